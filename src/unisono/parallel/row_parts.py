"""The state of tables in a user's loop in parts: the rows of each rank, and their restoration on any number of ranks.

A part is made of dicts, lists, numbers, strings and tensors, so `torch.load` reads it without running code from the
file. It has rows by their number, with the optimizer's state; that of rank 0 also has the ids of dynamic tables, the
seeds of first values and the hyperparameters. Start reading at `rows_of_rank`; `RowLoading` is the other way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.row_owners import RowOwners
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.embedding.zero_memory import zero_memory
from unisono.errors import CheckpointError
from unisono.parallel.state_parts import PartHeads

__all__ = ["RowLoading", "rows_of_rank"]

_FORM = "unisono rows"
_VERSION = 1
_CHUNK_ROWS = 1 << 20

_Module = RowTable | BagTable


@torch.no_grad()
def rows_of_rank(
    modules: Iterable[_Module], optimizer: TableOptimizer, *, rank: int, ranks: int, steps: int
) -> dict[str, Any]:
    """Return this rank's part of the state of tables. Local. Memory: a copy of the part.

    Args:
        modules: The tables, whose rows may be divided over ranks.
        optimizer: Their optimizer.
        rank: This rank.
        ranks: The number of ranks.
        steps: The number of steps made.
    """
    tables = []
    for module in modules:
        state = _rowed_state(optimizer, module)
        owners = _owners(module, rank, ranks)
        rows = torch.cat([rows[owners.own(rows)] for rows in _present(module)])
        table = {
            **_settings_of(module),
            "state step": optimizer.state.get(module.weight, {}).get("step"),
            "rows": rows,
            "weight": module.weight.detach()[rows],
            "state": {key: value[rows] for key, value in state.items()},
            "map": {} if rank else {key: value.clone() for key, value in _map_of(module).items()},
        }
        tables.append(table)
    return {
        **PartHeads.make(_FORM, _VERSION, rank=rank, ranks=ranks, steps=steps),
        "tables": tables,
        "settings": [] if rank else [_hyperparameters(group) for group in optimizer.param_groups],
    }


class RowLoading:
    """Restores tables from the parts of all ranks, one after the other.

    Where ranks share the memory of rows, all write the same values, so it does not matter when. Memory: the state of
    the optimizer of the rows that this rank keeps, or of all where ranks share them, and a part.

    Args:
        modules: The tables.
        optimizer: Their optimizer.
    """

    def __init__(self, modules: Iterable[_Module], optimizer: TableOptimizer) -> None:
        self._modules, self._optimizer = {module.name: module for module in modules}, optimizer
        self._stale: dict[str, Tensor] = {}
        """By table, True for each row that had values before, and has not been loaded."""

    @torch.no_grad()
    def load(self, parts: Iterable[Any]) -> int:
        """Load all parts, and return the number of steps that had been made.

        Raises:
            CheckpointError: They are no parts, not all parts of one state, or those of other tables.
        """
        heads = PartHeads(_FORM, _VERSION, what=" of tables", otherwise="write the rows with export_rows")
        for part in parts:
            heads.add(part)
            self._check(part)
            if heads.count == 1:
                self._begin()
            for table in part["tables"]:
                self._load_rows(table)
            if not part["rank"]:
                self._load_rest(part)
        steps = heads.complete()
        for name, module in self._modules.items():
            self._write(module, self._stale[name].nonzero().view(-1), 0)
        return steps

    def _check(self, part: Mapping[str, Any]) -> None:
        own, saved = [*map(_settings_of, self._modules.values())], [_settings_of(table) for table in part["tables"]]
        if own != saved:
            names = [table["name"] for table in own], [table["name"] for table in saved]
            what = next(
                (
                    f"table {here['name']!r} with {key} {there[key]!r}, and the loop one with {here[key]!r}"
                    for here, there in zip(own, saved, strict=False)
                    for key in here
                    if names[0] == names[1] and here[key] != there[key]
                ),
                f"the tables {names[1]}, and the loop {names[0]}",
            )
            raise CheckpointError(f"the parts have {what}: load parts of the same tables")

    def _begin(self) -> None:
        """Note which rows have values, and drop the state of the optimizer."""
        for name, module in self._modules.items():
            self._stale[name] = zero_memory([len(module.weight)], torch.bool)
            for rows in _present(module):
                self._stale[name][rows] = True
            if isinstance(module.rows, LazyRows):
                module.rows.written.zero_()
        self._optimizer.state.clear()

    def _load_rows(self, table: Mapping[str, Any]) -> None:
        module = self._modules[table["name"]]
        rows = table["rows"]
        which = torch.arange(len(rows))
        if module.rows is not None and module.rows.owners is not None:
            which = module.rows.owners.keep(rows).nonzero().view(-1)
            rows = rows[which]
        self._stale[module.name][rows] = False
        if isinstance(module.rows, LazyRows):
            module.rows.written[rows] = 1
        if table["state step"] is not None and not (state := self._optimizer.state[module.weight]):
            file, rule = module.file, type(module.table.optimizer)
            made = self._optimizer.new_state(module.weight, rule) if file is None else file.reserved_state()
            state.update({"step": table["state step"], **made})
        self._write(module, rows, table["weight"][which], {key: each[which] for key, each in table["state"].items()})

    def _write(
        self, module: _Module, rows: Tensor, weight: Tensor | int, state: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write rows, and their state; None: zeros for that."""
        module.weight.detach()[rows] = weight
        for key, value in _rowed_state(self._optimizer, module).items():
            value[rows] = 0 if state is None else state[key]

    def _load_rest(self, part: Mapping[str, Any]) -> None:
        """Load what rank 0 has."""
        for table in part["tables"]:
            own = _map_of(self._modules[table["name"]])
            for key, value in table["map"].items():
                own[key].copy_(value)
        for group, settings in zip(self._optimizer.param_groups, part["settings"], strict=True):
            group.update({key: _copied(value) for key, value in settings.items()})


def _owners(module: _Module, rank: int, ranks: int) -> RowOwners:
    """Return which rank saves which rows."""
    if module.rows is not None and module.rows.owners is not None:
        return module.rows.owners
    row_nbytes = module.weight.shape[1] * module.weight.element_size()
    return RowOwners(len(module.weight), row_nbytes, rank=rank, ranks=ranks)


def _rowed_state(optimizer: TableOptimizer, module: _Module) -> dict[str, Tensor]:
    """Return the state of a table that has an entry for each row."""
    state = optimizer.state.get(module.weight, {})
    return {
        key: value for key, value in state.items() if isinstance(value, Tensor) and len(value) == len(module.weight)
    }


def _present(module: _Module) -> Iterator[Tensor]:
    """Yield the rows that have values here, in chunks."""
    length = len(module.weight)
    for start in range(0, length, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, length)
        rows = torch.arange(start, stop)
        if module.rows is not None:
            rows = rows[module.rows.present(start, stop) != 0]
        yield rows


def _settings_of(table: _Module | Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table has in common with its saved rows."""
    if not isinstance(table, nn.Module):
        return {key: table[key] for key in ("name", "shape", "dtype", "kind", "optimizer", "tensors of ids")}
    kind = "dynamic" if table.table.rows is None else "fixed" if table.rows is None else "written on first update"
    return {
        "name": table.name,
        "shape": [*table.weight.shape],
        "dtype": str(table.weight.dtype).removeprefix("torch."),
        "kind": kind,
        "optimizer": type(table.table.optimizer).__name__,
        "tensors of ids": {key: [*value.shape] for key, value in _map_of(table).items()},
    }


def _map_of(module: _Module) -> dict[str, Tensor]:
    """Return what is known of all rows: the ids of a dynamic table, and the seed of first values."""
    if module.rows is None:
        return {}
    return {name: p.detach() for name, p in module.rows.named_parameters() if name != "written"}


def _hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
