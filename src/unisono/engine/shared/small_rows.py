"""The gradients of a small model in shared memory, and their sum.

Here the data are in the cache, and what costs is each call of torch and each line of Python. So gradients are kept
where backward left them until the rank's leaves are done, and then written for the others by one call. See `Rows`,
whose place it takes: rows, sums and their order are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.node_sums import Gradients
from unisono.engine.norm import dense_strides, run_of
from unisono.engine.shared.addition_schedule import AdditionSchedule, add_at_once
from unisono.engine.shared.parameter_arena import TensorLayout
from unisono.engine.shared.partition import Shard
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.shm.segment import Segment

__all__ = ["SmallRows"]


class _Cut(NamedTuple):
    """A piece that is not all of its parameter, among some pieces."""

    k: int
    """Its number among them."""
    parameter: int
    start: int
    stop: int


class _Pieces:
    """Some pieces of the parameters, to be taken from gradients."""

    def __init__(self, pieces: Sequence[Shard], parameters: Sequence[Tensor]) -> None:
        self._strides = [dense_strides(p) for p in parameters]
        self._parameters = [piece.parameter for piece in pieces]
        self._cuts = [_Cut(k, *p) for k, p in enumerate(pieces) if p.stop - p.start != parameters[p.parameter].numel()]

    def of(self, gradients: Gradients) -> Gradients:
        """Show the pieces of some gradients: whole ones as they are, others as vectors in the order of memory."""
        found = [gradients[i] for i in self._parameters]
        for k, parameter, start, stop in self._cuts:
            if (gradient := found[k]) is not None:
                found[k] = run_of(gradient, self._strides[parameter], start, stop)
        return found


class _BatchedPlan:
    """What a rank writes and sums in a step of a given number of leaves."""

    def __init__(self, rows: SmallRows, layout: NodeLayout) -> None:
        self.schedule = AdditionSchedule(layout, rows.rank)
        self.places: list[list[Tensor]] = [[] for _ in layout.nodes[rows.rank]]
        """By own node: where the pieces of the other ranks go."""
        for owner, pieces in enumerate(rows.parts):
            if owner != rows.rank:
                of_owner = AdditionSchedule(layout, owner)
                for i, places in enumerate(self.places):
                    places += [rows.place(of_owner.row(rows.rank, i), piece) for piece in pieces]
        self.own_rows = {
            s: [rows.place(-1 - s, piece) for piece in rows.parts[rows.rank]] for s in self.schedule.sources if s < 0
        }
        """The pieces of this rank in each row."""


class SmallRows:
    """The rows of one engine, which lie in a segment of their own. Args: parts has the pieces of each rank."""

    def __init__(
        self,
        make: partial[Segment],
        parameters: Sequence[Tensor],
        parts: Sequence[Sequence[Shard]],
        *,
        rank: int,
        widest: NodeLayout,
    ) -> None:
        self.rank, self.parts, self._count = rank, parts, len(parameters)
        self._layout = TensorLayout(parameters)
        self._segment = make(AdditionSchedule.most_rows(widest) * self._layout.nbytes)
        self.gradients = [self._layout.whole(self._segment, i) for i in range(len(parameters))]
        """The summed gradient of each parameter, once all ranks have summed."""
        self.totals = [self._layout.vector(self._segment, *piece) for piece in parts[rank]]
        """The same for the pieces of this rank."""
        self._sums = [self.place(0, piece) for piece in parts[rank]]
        others = [piece for owner, pieces in enumerate(parts) if owner != rank for piece in pieces]
        self._pieces, self._others = (_Pieces(pieces, parameters) for pieces in (parts[rank], others))
        self._plans: dict[int, _BatchedPlan] = {}
        self._plan = self._plan_for(widest)
        self._own: list[Gradients] = []

    def start(self, layout: NodeLayout, attempt: int) -> None:
        """Begin a step. Nothing is written yet."""
        plan = self._plans.get(layout.leaves)
        self._plan = plan if plan is not None else self._plan_for(layout)
        self._own = [[None] * self._count for _ in layout.nodes[self.rank]]

    def put(self, i: int, index: int, gradient: Tensor | None) -> None:
        """Take one parameter's gradient for this rank's node number i; None counts as zero."""
        self._own[i][index] = gradient

    def put_sum(self, i: int, index: int, left: Tensor, right: Tensor) -> None:
        """Take the sum of two gradients, both of which are used up."""
        self._own[i][index] = left.add_(right)

    def put_all(self, i: int, gradients: Gradients) -> None:
        """Take the gradients of all parameters for this rank's node number i."""
        self._own[i] = gradients

    def flush(self) -> None:
        """Write for the others what was taken."""
        for gradients, places in zip(self._own, self._plan.places, strict=True):
            sources = self._others.of(gradients)
            given = [source for source in sources if source is not None]
            if len(given) == len(sources):
                taken = places
            else:
                pairs = [*zip(places, sources, strict=True)]
                taken = [place for place, source in pairs if source is not None]
                torch._foreach_zero_([place for place, source in pairs if source is None])
            if taken:
                torch._foreach_copy_(taken, given)

    def reduce(self, used: Sequence[bool], factor: float) -> None:
        """Sum this rank's part over all nodes, and multiply it by a factor; the gradients given are used up."""
        schedule, sums = self._plan.schedule, self._sums
        if sums:
            summands = dict(self._plan.own_rows)
            for i, gradients in enumerate(self._own):
                pieces = self._pieces.of(gradients)
                summands[i] = [torch.zeros_like(s) if p is None else p for p, s in zip(pieces, sums, strict=True)]
            if schedule.total >= 0:
                torch._foreach_copy_(sums, summands[schedule.total])
                summands[schedule.total] = sums
            add_at_once(summands, schedule.additions, total=schedule.total, factor=factor)
        self._own = []

    def place(self, row: int, piece: Shard) -> Tensor:
        """Show a piece of a row; a whole parameter as what it is."""
        base = row * self._layout.nbytes
        if piece.stop - piece.start == self.gradients[piece.parameter].numel():
            return self._layout.whole(self._segment, piece.parameter, base=base)
        return self._layout.vector(self._segment, *piece, base=base)

    def forget(self) -> None:
        """Let go of the gradients that were given."""
        self._own = []

    def _plan_for(self, layout: NodeLayout) -> _BatchedPlan:
        plan = self._plans[layout.leaves] = _BatchedPlan(self, layout)
        return plan
