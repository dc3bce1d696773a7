"""The optimizer of tables: an optimizer of torch that updates the rows in a sparse gradient, and no others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.embedding.growth import resize
from unisono.embedding.huge_pages import advise_huge_pages
from unisono.embedding.lazy_rows import LazyRows
from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_optimizers import RowOptimizer, rule_named
from unisono.embedding.row_sums import rows_of
from unisono.embedding.row_updates import update_rows
from unisono.embedding.table_file import TableFile
from unisono.embedding.zero_memory import zero_memory
from unisono.errors import TableFullError

__all__ = ["TableOptimizer"]


class TableOptimizer(Optimizer):
    """Updates tables from sparse gradients, each by a rule of its own.

    `Tables.optimizer` is one. It has a parameter group for each table, whose `lr` a scheduler may change. The state is
    made at the first update of a table, with zeros; memory: see each rule. The time of a step is proportional to the
    rows in the gradient.

    Args:
        tables: Each table's weight, [rows, dim], and its rule.
        maps: The rows of tables of which some have no values yet, by weight. The gradients of dynamic ones have ids in
            place of rows.
        files: The files of tables that are in one, by weight.
    """

    def __init__(
        self,
        tables: Sequence[tuple[Tensor, RowOptimizer]],
        *,
        maps: Mapping[Tensor, LocatedRows] | None = None,
        files: Mapping[Tensor, TableFile] | None = None,
    ) -> None:
        super().__init__([{"params": [weight], **rule.group()} for weight, rule in tables], {})
        self.maps, self.files = dict(maps or {}), dict(files or {})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies: torch's leaves out what it does not know."""
        return {**super().__getstate__(), "maps": self.maps, "files": {}}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the rows in p.grad.

        Args:
            closure: Computes the loss and its gradient again, and returns it.

        Returns:
            What the closure returned; None without one.

        Raises:
            ValueError: A gradient is dense.
            TableFullError: A dynamic table has no row for a new id. No table has been changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p, rows in self.maps.items():
            if p.grad is not None and p.grad.is_sparse:
                self._make_room(rows, [rows_of(p.grad).rows])
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)
        return loss

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        gradient = p.grad
        assert gradient is not None
        if not gradient.is_sparse:
            raise ValueError(
                f"the gradient of a table of shape {list(p.shape)} is dense: something else than its module has used "
                "its weight, as with tied weights. Use a table by its module alone."
            )
        indices, values = rows_of(gradient)
        rule = rule_named(group["rule"])
        self.make_state(p, rule)
        state = self.state[p]
        state["step"] += 1
        rows = self.maps.get(p)
        # Where rows are divided, this rank may have none of a step that changes the map of all.
        if not len(indices) and not (isinstance(rows, RowMap) and any(map(len, rows.announced or ()))):
            return
        if rows is not None:
            indices, values = self._placed(p, indices, values)
        update_rows(rule, p.detach(), indices, values, state, group, state["step"])

    def make_state(self, p: Tensor, rule: type[RowOptimizer]) -> None:
        """Make the state of a table, unless there is one.

        Raises:
            UnisonoError: The table is in a file, and the disk has no room for it.
        """
        state = self.state[p]
        if state:
            return
        if p in self.files:
            state.update({"step": 0, **self.files[p].new_state()})
            return
        state.update({"step": 0, **self.new_state(p, rule)})

    def new_state(self, p: Tensor, rule: type[RowOptimizer]) -> dict[str, Tensor]:
        """Return zeros for the state of a table in memory, by key."""
        shapes = {**dict.fromkeys(rule.per_row, p.shape[:1]), **dict.fromkeys(rule.per_element, p.shape)}
        rows = self.maps.get(p)
        if rows is not None and rows.owners is not None:
            return {key: zero_memory(shape, p.dtype, small_pages=True) for key, shape in shapes.items()}
        state = {key: torch.zeros(shape, dtype=p.dtype, device=p.device) for key, shape in shapes.items()}
        for key in rule.per_element:
            advise_huge_pages(state[key])
        return state

    def grow(self) -> bool:
        """Give more rows to the dynamic tables that have refused an update for want of rows, and that grow.

        Returns:
            False if there is none.

        Raises:
            MemoryError: There is not enough memory.
        """
        growing = [(p, rows) for p, rows in self.maps.items() if rows.wanted_length > len(p)]
        for p, rows in growing:
            assert isinstance(rows, RowMap)
            resize(p, rows, rows.wanted_length, self.state.get(p))
        return bool(growing)

    def _make_room(self, rows: LocatedRows, ids: Sequence[Tensor]) -> None:
        try:
            rows.check_room(ids)
        except TableFullError:
            if not self.grow():
                raise

    def _placed(self, p: Tensor, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of a table by row: of the ids that have one here, after taking rows for new ones."""
        rows = self.maps[p]
        if rows.owners is not None and isinstance(rows, LazyRows):
            kept = rows.owners.keep(ids).nonzero().view(-1)
            if len(kept) < len(ids):
                ids, values = ids[kept], values[kept]
        indices, new = rows.place(ids)
        updates = indices >= 0
        if rows.owners is not None and isinstance(rows, RowMap):
            updates &= rows.owners.keep(indices)
            new = new[updates[new]]
        if len(new):
            rows.write_first(ids[new], indices[new], p, self.state[p])
        return (indices, values) if bool(updates.all()) else (indices[updates], values[updates])
