"""The gradients of a step in shared memory, and their sum.

Each rank updates a part of the parameters, and so sums that part of the gradient. It reads its own gradient where
backward left it, or in rows of its own where it has but a piece of a parameter: the rest need not be kept then. It
reads those of the others from rows: for each part there is a row for every node of the tree that another rank has. The
sum of a part ends in the first row, which is thus the whole gradient once all ranks have summed. Additions are those
of the tree, whoever does them; a + b and b + a have the same bits. Small models have `SmallRows`, more than two ranks
`PairedRows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.node_sums import Gradients
from unisono.engine.norm import in_memory_order, run_of
from unisono.engine.shared.addition_schedule import AdditionSchedule, add_up
from unisono.engine.shared.parameter_arena import TensorLayout
from unisono.engine.shared.partition import Shard
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.shm.segment import Segment

__all__ = ["Rows"]


class _Target(NamedTuple):
    """Where a rank writes a piece of its gradient, for others or to keep it."""

    start: int
    stop: int
    is_whole: bool
    """Whether it is all of the parameter."""
    place: Tensor
    """Of the parameter's shape, or of that length."""


class _DirectPlan:
    """What a rank writes and sums in a step of a given number of leaves."""

    def __init__(self, rows: Rows, layout: NodeLayout) -> None:
        rank = rows.rank
        self.schedule = schedule = AdditionSchedule(layout, rank)
        of_owners = [AdditionSchedule(layout, owner) for owner in range(rows.size)]
        self.targets: list[list[list[_Target]]] = [[[] for _ in rows.strides] for _ in layout.nodes[rank]]
        """By own node and parameter."""
        self.kept = [False] * len(rows.strides)
        """Whether this rank reads a parameter's own gradient where backward left it."""
        self.own_places: dict[tuple[int, int], Tensor] = {}
        """Where the gradient of a piece is kept, by own node and parameter."""
        for owner, pieces in enumerate(rows.parts):
            for index, start, stop in pieces:
                if owner == rank and rows.is_whole(index, start, stop):
                    self.kept[index] = True
                for i in range(0 if owner == rank and self.kept[index] else len(layout.nodes[rank])):
                    row = rows.others + i if owner == rank else of_owners[owner].row(rank, i)
                    place = rows.place(row, index, start, stop)
                    is_whole = rows.is_whole(index, start, stop)
                    self.targets[i][index].append(_Target(start, stop, is_whole, place))
                    if owner == rank:
                        self.own_places[i, index] = place
        self.own_rows = {
            s: [rows.vector(-1 - s, *piece) for piece in rows.parts[rank]] for s in schedule.sources if s < 0
        }
        """The pieces of this rank in each row."""


class Rows:
    """The rows of one engine, which lie in a segment of their own.

    Args: parts has the pieces of each rank. strides are those of each parameter, and of its gradient.
    """

    def __init__(
        self,
        make: partial[Segment],
        parameters: Sequence[Tensor],
        strides: Sequence[tuple[int, ...]],
        parts: Sequence[Sequence[Shard]],
        *,
        rank: int,
        widest: NodeLayout,
    ) -> None:
        self.rank, self.size, self.parts, self.strides = rank, len(parts), parts, strides
        self._layout = TensorLayout(parameters)
        self.others = AdditionSchedule.most_rows(widest)
        """How many rows there are for the gradients of others."""
        self._segment = make((self.others + max(map(len, widest.nodes))) * self._layout.nbytes)
        self.gradients = [self._layout.whole(self._segment, i) for i in range(len(parameters))]
        """The summed gradient of each parameter, once all ranks have summed."""
        self.totals = [self.vector(0, *piece) for piece in parts[rank]]
        """The same for the pieces of this rank."""
        self._plans: dict[int, _DirectPlan] = {}
        self._plan = self._plan_for(widest)
        self._own: list[Gradients] = []

    def start(self, layout: NodeLayout, attempt: int) -> None:
        """Begin a step. Nothing is written yet."""
        plan = self._plans.get(layout.leaves)
        self._plan = plan if plan is not None else self._plan_for(layout)
        self._own = [[None] * len(self.strides) for _ in layout.nodes[self.rank]]

    def put(self, i: int, index: int, gradient: Tensor | None) -> None:
        """Take one parameter's gradient for this rank's node number i; None counts as zero."""
        for start, stop, is_whole, place in self._plan.targets[i][index]:
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient if is_whole else run_of(gradient, self.strides[index], start, stop))
        if self._plan.kept[index]:
            self._own[i][index] = gradient

    def put_all(self, i: int, gradients: Gradients) -> None:
        """Take the gradients of all parameters for this rank's node number i."""
        for index, gradient in enumerate(gradients):
            self.put(i, index, gradient)

    def put_sum(self, i: int, index: int, left: Tensor, right: Tensor) -> None:
        """Take the sum of two gradients, both of which are used up."""
        if self._plan.kept[index]:
            self.put(i, index, left.add_(right))
            return
        strides = self.strides[index]
        for start, stop, is_whole, place in self._plan.targets[i][index]:
            if is_whole:
                torch.add(left, right, out=place)
            else:
                lefts, rights = in_memory_order(left, strides), in_memory_order(right, strides)
                torch.add(lefts[start:stop], rights[start:stop], out=place)

    def flush(self) -> None:
        """Nothing is left to write."""

    def reduce(self, used: Sequence[bool], factor: float) -> None:
        """Sum this rank's part over all nodes, and multiply it by a factor; the gradients given are used up."""
        plan, pieces = self._plan, self.parts[self.rank]
        chosen: Sequence[int] = range(len(pieces))
        if not all(used):
            chosen = [k for k in chosen if used[pieces[k].parameter]]
        if not chosen:
            self._own = []
            return
        vectors: dict[int, list[Tensor]] = {}
        for source in plan.schedule.sources:
            if source >= 0:
                vectors[source] = [self._kept(source, pieces[k]) for k in chosen]
            elif len(chosen) == len(pieces):
                vectors[source] = plan.own_rows[source]
            else:
                vectors[source] = [plan.own_rows[source][k] for k in chosen]
        if plan.schedule.total >= 0:
            totals = [self.totals[k] for k in chosen]
            torch._foreach_copy_(totals, vectors[plan.schedule.total])
            vectors[plan.schedule.total] = totals
        add_up(vectors, plan.schedule.additions, total=plan.schedule.total, factor=factor)
        self._own = []

    def place(self, row: int, index: int, start: int, stop: int) -> Tensor:
        """Show a piece of a row; a whole parameter as what it is."""
        if self.is_whole(index, start, stop):
            return self._layout.whole(self._segment, index, base=row * self._layout.nbytes)
        return self.vector(row, index, start, stop)

    def is_whole(self, index: int, start: int, stop: int) -> bool:
        """Whether a piece is all of its parameter."""
        return stop - start == self.gradients[index].numel()

    def vector(self, row: int, index: int, start: int, stop: int) -> Tensor:
        """Show a piece of a row."""
        return self._layout.vector(self._segment, index, start, stop, base=row * self._layout.nbytes)

    def forget(self) -> None:
        """Let go of the gradients that were given."""
        self._own = []

    def _plan_for(self, layout: NodeLayout) -> _DirectPlan:
        plan = self._plans[layout.leaves] = _DirectPlan(self, layout)
        return plan

    def _kept(self, i: int, piece: Shard) -> Tensor:
        place = self._plan.own_places.get((i, piece.parameter))
        if place is not None:
            return place
        gradient = self._own[i][piece.parameter]
        if gradient is None:
            return torch.zeros_like(self.vector(0, *piece))
        return run_of(gradient, self.strides[piece.parameter], piece.start, piece.stop)
