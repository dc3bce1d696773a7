"""Which rank updates which rows of which table.

A table of an optimizer of torch is updated by one rank. The rows of `unisono.embedding` tables are divided among the
ranks anew in each step, as the table and its state lie in memory that all ranks write: each rank takes a range of rows
with about equally many entries (`TableSums.share`), so shares are even whatever the ids are.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer

from unisono.embedding.table_optimizer import TableOptimizer
from unisono.engine.base import Trained
from unisono.engine.joint_optimizer import parts_of
from unisono.engine.shared.optimizer_update import OptimizerUpdate
from unisono.engine.shared.partition import Piece, assign_whole
from unisono.engine.sparse_tables import TableSums

__all__ = ["TableDivision"]


class TableDivision:
    """The tables of which this rank updates rows.

    Args:
        optimizer: The step's optimizer.
        tables: The parameters with sparse gradients.
        rank: This rank.
        size: The number of ranks.
        first: The number of the first table among all parameters, since tables follow the others.
    """

    def __init__(self, optimizer: Optimizer, tables: Trained, *, rank: int, size: int, first: int) -> None:
        parts = [part for part in parts_of(optimizer) if type(part) is TableOptimizer]
        by_row = {id(p) for part in parts for group in part.param_groups for p in group["params"]}
        self._size, self._first = size, first
        self.divided = frozenset(i for i, p in enumerate(tables.parameters) if id(p) in by_row)
        """The tables whose rows ranks divide, by number among the tables."""
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
            found.append(gradient)
        return found
