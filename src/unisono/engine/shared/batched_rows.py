"""Rows for a small model: few calls, each over all parameters.

Here the data are in the cache, and the cost is in calls of torch and lines of Python. So gradients are kept where
backward left them until the rank's leaves are done, and one call for each node then writes them for the other ranks.
Rows, sums and their order are those of `DirectRows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.node_sums import Gradients
from unisono.engine.norm import run_of
from unisono.engine.shared.addition_schedule import AdditionSchedule, add_at_once
from unisono.engine.shared.gradient_rows import GradientRows
from unisono.engine.shared.partition import Piece
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.tree_all_reduce import NodeLayout

__all__ = ["BatchedRows"]


class _Cut(NamedTuple):
    """A piece, one of several, that is not all of its parameter."""

    k: int
    """The number of the piece."""
    parameter: int
    start: int
    stop: int


class _Pieces:
    """Selects some pieces of the parameters from gradients."""

    def __init__(self, pieces: Sequence[Piece], rows: BatchedRows) -> None:
        self._strides = rows.strides
        self._parameters = [piece.parameter for piece in pieces]
        self._cuts = [_Cut(k, *piece) for k, piece in enumerate(pieces) if not rows.is_whole(piece)]

    def of(self, gradients: Gradients) -> Gradients:
        """Return the pieces of some gradients: whole ones as they are, others as vectors in memory order."""
        found = [gradients[i] for i in self._parameters]
        for k, parameter, start, stop in self._cuts:
            if (gradient := found[k]) is not None:
                found[k] = run_of(gradient, self._strides[parameter], start, stop)
        return found


class _BatchedPlan:
    """The places to which a rank writes and the rows that it sums, in a step with a given number of leaves."""

    def __init__(self, rows: BatchedRows, layout: NodeLayout) -> None:
        self.schedule = AdditionSchedule(layout, rows.rank)
        self.places: list[list[Tensor]] = [[] for _ in layout.nodes[rows.rank]]
        """For each node of this rank, the places of the other ranks' pieces."""
        for owner, pieces in enumerate(rows.parts):
            if owner != rows.rank:
                of_owner = AdditionSchedule(layout, owner)
                for i, places in enumerate(self.places):
                    places += [rows.place(of_owner.row(rows.rank, i), piece) for piece in pieces]
        self.own_rows = {
            s: [rows.place(-1 - s, piece) for piece in rows.parts[rows.rank]] for s in self.schedule.sources if s < 0
        }
        """The pieces of this rank in each row, by source."""


class BatchedRows(GradientRows[_BatchedPlan]):
    """The rows of one engine; see `GradientRows`."""

    def _set_up(self, runtime: SharedRuntime, parameters: Sequence[Tensor]) -> None:
        self._sums = [self.place(0, piece) for piece in self.parts[self.rank]]
        others = [piece for owner, pieces in enumerate(self.parts) if owner != self.rank for piece in pieces]
        self._pieces, self._others = (_Pieces(pieces, self) for pieces in (self.parts[self.rank], others))

    def put(self, i: int, index: int, gradient: Tensor | None) -> None:
        """Store the gradient for `flush`; see `GradientRows`."""
        self._own[i][index] = gradient

    def put_sum(self, i: int, index: int, left: Tensor, right: Tensor) -> None:
        """Store the sum for `flush`; see `GradientRows`."""
        self._own[i][index] = left.add_(right)

    def put_all(self, i: int, gradients: Gradients) -> None:
        """Store the gradients for `flush`; see `GradientRows`."""
        self._own[i] = gradients

    def flush(self) -> None:
        """Write the stored gradients, by one call for each node; see `GradientRows`."""
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
        """Sum this rank's gradients and the rows; see `GradientRows`."""
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

    def _count_rows(self) -> int:
        return AdditionSchedule.most_rows(self.widest)

    def _make_plan(self, layout: NodeLayout) -> _BatchedPlan:
        return _BatchedPlan(self, layout)
