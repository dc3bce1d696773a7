"""Which rank updates which rows of which table.

A table of an optimizer of torch is updated by one rank. The rows of `unisono.embedding` tables are divided among the
ranks anew in each step, as the table and its state lie in memory that all ranks write: each rank takes a range of rows
with about equally many entries (`TableSums.share`), so shares are even whatever the ids are.

In a dynamic table an id has a row once an update has brought a gradient for it. Each rank takes rows for the new ids of
all ranks, and so has the same map of ids as the others, and writes the first values of those in its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.row_sums import SummedRows, row_gradient
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.engine.base import Trained
from unisono.engine.joint_optimizer import parts_of
from unisono.engine.shared.optimizer_update import OptimizerUpdate
from unisono.engine.shared.partition import Piece, assign_whole
from unisono.engine.sparse_tables import TableSums

__all__ = ["TableDivision"]


class _NewRows(NamedTuple):
    """Rows of one table that this rank updates, and that have no values yet."""

    rows: LocatedRows
    table: Tensor
    ids: Tensor
    places: Tensor


class TableDivision:
    """The tables of which this rank updates rows.

    Args:
        optimizer: The step's optimizer.
        tables: The parameters with sparse gradients.
        rank: This rank.
        size: The number of ranks.
        first: The number of the first table among all parameters, since tables follow the others.
        maps: The rows of dynamic tables, by number among the tables.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        tables: Trained,
        *,
        rank: int,
        size: int,
        first: int,
        maps: Mapping[int, LocatedRows],
    ) -> None:
        parts = [part for part in parts_of(optimizer) if type(part) is TableOptimizer]
        by_row = {id(p) for part in parts for group in part.param_groups for p in group["params"]}
        self._size, self._first, self._maps = size, first, maps
        self._new: list[_NewRows] = []
        self._changed: list[LocatedRows] = []
        """The maps that an update has changed which is not committed."""
        self.divided = frozenset(i for i, p in enumerate(tables.parameters) if id(p) in by_row)
        """The tables whose rows ranks divide, by number among the tables."""
        self._tables = tables.parameters
        numels = [p.numel() for p in tables.parameters]
        self._owned = {piece.parameter for piece in assign_whole(numels, ranks=size)[rank]}
        """The tables that this rank updates if one rank does, and whose state it makes."""
        self.numbers = sorted(self._owned | self.divided)
        """The tables of which this rank updates rows."""
        self.pieces = [Piece(first + i, 0, numels[i]) for i in self.numbers]
        self.places = [tables.parameters[i] for i in self.numbers]
        self.is_undoable = len(self.divided) == len(numels)
        """True unless an optimizer of torch updates a table: the rows and state that it writes are not known."""
        self.guests = {first + i for i in self.divided - self._owned}
        """The parameters whose state other ranks make; see `SharedState`."""

    def gradients(self, sums: TableSums, updates: Sequence[OptimizerUpdate], factor: float) -> list[Tensor | None]:
        """Return, for each of `numbers`, the gradient of the rows that this rank updates.

        Ids of dynamic tables have become rows in it, which are taken on all ranks.

        Args:
            sums: The sums of the step.
            updates: The optimizers, which have adopted new state.
            factor: The factor of sums that are not complete yet.
        """
        found = []
        for i in self.numbers:
            gradient = sums.totals[i]
            if i in self.divided:
                is_complete = gradient is not None
                gradient = None
                if any(update.state.is_shared(self._first + i) for update in updates):
                    gradient = sums.share(i, ranks=self._size)
                elif i in self._owned:
                    gradient = sums.share(i, ranks=1)
                if gradient is not None and not is_complete and factor != 1.0:
                    gradient._values().mul_(factor)
            if i in self._maps and sums.used[i]:
                gradient = self._with_rows(i, gradient, sums.rows(i))
            found.append(gradient)
        return found

    def write_new_rows(self, updates: Sequence[OptimizerUpdate]) -> None:
        """Write the first values of the rows that are new in this step, and that this rank updates."""
        for rows, table, ids, places in self._new:
            state = next((u.sharded.state[table] for u in updates if table in u.sharded.state), {})
            rows.write_first(ids, places, table.detach(), state)
        self._new = []

    def new_rows(self, table: int) -> Tensor:
        """Return the rows of a table, by number, that this rank is about to write the first values of."""
        found = [new.places for new in self._new if new.table is self._tables[table]]
        return found[0] if found else torch.empty(0, dtype=torch.int64)

    def commit(self) -> None:
        """Keep the changes of maps. Call it once all ranks have ended the update."""
        self._changed = []

    def take_back(self) -> None:
        """Take back the changes of maps in an update that has been undone."""
        self._new = []
        for rows in self._changed:
            rows.undo()
        self._changed = []

    def _with_rows(self, i: int, gradient: Tensor | None, everyone: Sequence[Tensor]) -> Tensor | None:
        """Take rows for the ids of all ranks, and return the gradient with rows in place of ids."""
        if not any(map(len, everyone)):
            return gradient
        rows = self._maps[i]
        self._changed.append(rows)
        ids = everyone[0][:0] if gradient is None else gradient._indices()[0]
        places, new = rows.place(ids, everyone)
        if gradient is None:
            return None
        if len(new):
            self._new.append(_NewRows(rows, self._tables[i], ids[new], places[new]))
        values = gradient._values()
        if not bool((is_admitted := places >= 0).all()):
            places, values = places[is_admitted], values[is_admitted]
        return row_gradient(SummedRows(places, values), gradient.shape)
