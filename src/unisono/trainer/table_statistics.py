"""Statistics of lookups in embedding tables: about once a second, the ids of one step on rank 0.

Hooks on the tables see the ids of that step alone, and are removed after it: other steps do not know of them. Start
reading at `TableStatistics.begin`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.watch import EventLog
from unisono.watch.loop_fields import TableFigures

__all__ = ["TableStatistics"]

_EVERY_S = 1.0
_MOST_IDS = 16_384
"""Ids of a lookup that are counted, in all tables together: of more, each second one, or each third, and so on."""
_KEPT = 1024
"""Ids whose numbers are remembered for the most frequent ones."""
_SHOWN = 8


class _Counted:
    """A table, and what has been seen of its ids."""

    def __init__(self, module: RowTable | BagTable, most: int) -> None:
        self.module, self._most = module, most
        # Of rows that are divided over ranks, this rank knows its own alone.
        self._rows = None if isinstance(module.rows, LazyRows) and module.rows.owners is not None else module.rows
        self.looked_up = 0
        """Ids of the step, of which `sample` has some."""
        self.sample: list[Tensor] = []
        self.hits = 0
        """Those in the sample that have a row, in a dynamic table."""
        self._frequent = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self._seen = 0

    def see(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the ids of a lookup, as a hook before it. Wrong ones are left to the lookup."""
        ids = args[0] if args else kwargs.get("input")
        if not isinstance(ids, Tensor) or not ids.numel():
            return
        flat = ids.detach().reshape(-1)
        self.looked_up += len(flat)
        some = flat[:: -(-len(flat) // self._most)].to(self.module.weight.device, torch.int64)
        if self._rows is not None:
            self.hits += int((self._rows.find(some) >= 0).sum())
        self.sample.append(some.cpu())

    def figures(self) -> TableFigures | None:
        """Return what the step has looked up, and forget it; None for nothing."""
        if not self.sample:
            return None
        ids, numbers = torch.unique(torch.cat(self.sample), return_counts=True)
        sampled, looked_up, hits = int(numbers.sum()), self.looked_up, self.hits
        self.sample, self.looked_up, self.hits = [], 0, 0
        self._count(ids, numbers)
        weight, rows = self.module.weight, self._rows
        found: TableFigures = {
            "rows": len(weight) if rows is None else rows.count,
            "capacity": len(weight),
            "ids": looked_up,
            "distinct": len(ids) / sampled,
            "nbytes": looked_up * weight.shape[1] * weight.element_size(),
            "hottest": [[row, round(number / self._seen, 6)] for row, number in self._hottest()],
        }
        if rows is not None:
            found["hit_rate"] = hits / sampled
            found["evicted"] = rows.evicted
        return found

    def _count(self, ids: Tensor, numbers: Tensor) -> None:
        self._seen += int(numbers.sum())
        joined, places = torch.unique(torch.cat([self._frequent[0], ids]), return_inverse=True)
        sums = torch.zeros(len(joined), dtype=torch.int64)
        sums.index_add_(0, places, torch.cat([self._frequent[1], numbers]))
        order = sums.argsort(descending=True, stable=True)[:_KEPT]
        self._frequent = joined[order], sums[order]

    def _hottest(self) -> list[tuple[int, int]]:
        ids, numbers = (each[:_SHOWN].tolist() for each in self._frequent)
        return [*zip(ids, numbers, strict=True)]


class TableStatistics:
    """Tells what steps look up in tables, on the rank whose log tells events.

    Args:
        modules: The models by the prefix of their names.
        log: Gets the events.
    """

    def __init__(self, modules: Mapping[str, nn.Module], log: EventLog) -> None:
        self._log = log
        tables = {
            f"{prefix}{path}": module
            for prefix, root in modules.items()
            for path, module in root.named_modules()
            if isinstance(module, RowTable | BagTable)
        }
        most = -(-_MOST_IDS // max(len(tables), 1))
        self._tables = {name: _Counted(module, most) for name, module in tables.items()}
        self._next_s = 0.0
        self._hooks: list[RemovableHandle] = []

    def begin(self, function: Callable[..., Any]) -> None:
        """Look at the step that begins, if it is time. A compiled function is left alone: hooks would compile it anew.

        Args:
            function: The loss function.
        """
        if not self._tables or time.monotonic() < self._next_s or not self._log.hears("tables"):
            return
        self._next_s = time.monotonic() + _EVERY_S
        if hasattr(function, "_torchdynamo_orig_callable"):
            return
        for each in self._tables.values():
            if each.module._compiled_call_impl is None:
                self._hooks.append(each.module.register_forward_pre_hook(each.see, with_kwargs=True))

    def give_up(self) -> None:
        """Forget a step that has failed."""
        self._end()
        for each in self._tables.values():
            each.sample, each.looked_up, each.hits = [], 0, 0

    def end(self, total_steps: int) -> None:
        """Tell what the step has looked up, if it was looked at; `total_steps` counts it."""
        if not self._hooks:
            return
        self._end()
        found = {name: figures for name, each in self._tables.items() if (figures := each.figures()) is not None}
        if found:
            self._log.emit("tables", total_steps=total_steps, tables=found)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
