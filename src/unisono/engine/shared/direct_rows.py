"""Rows for two ranks and a large model: whole parameters are copied only for another rank to read.

A rank reads its own gradient where backward left it. If it has only a piece of a parameter, it reads that from private
rows, so that the rest of the gradient need not be kept. It reads the gradients of other ranks from rows: each part has
a row for every node of the tree that another rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.norm import in_memory_order, run_of
from unisono.engine.shared.addition_schedule import AdditionSchedule, add_up
from unisono.engine.shared.gradient_rows import GradientRows
from unisono.engine.shared.partition import Piece
from unisono.engine.tree_all_reduce import NodeLayout

__all__ = ["DirectRows"]


class _Target(NamedTuple):
    """The place to which a rank writes a piece of its gradient, for others or to keep it."""

    start: int
    stop: int
    is_whole: bool
    """True if the piece is all of the parameter."""
    place: Tensor
    """Memory with the parameter's shape, or a vector with the piece's length."""


class _DirectPlan:
    """The pieces that a rank writes and the rows that it sums, in a step with a given number of leaves."""

    def __init__(self, rows: DirectRows, layout: NodeLayout) -> None:
        rank, first_own = rows.rank, AdditionSchedule.most_rows(rows.widest)
        self.schedule = schedule = AdditionSchedule(layout, rank)
        of_owners = [AdditionSchedule(layout, owner) for owner in range(len(rows.parts))]
        self.targets: list[list[list[_Target]]] = [[[] for _ in rows.strides] for _ in layout.nodes[rank]]
        """The targets, by node of this rank and parameter."""
        self.kept = [False] * len(rows.strides)
        """For each parameter, True if this rank reads its own gradient where backward left it."""
        self.own_places: dict[tuple[int, int], Tensor] = {}
        """The place where the gradient of this rank's piece is kept, by node of this rank and parameter."""
        for owner, pieces in enumerate(rows.parts):
            for piece in pieces:
                index, is_whole = piece.parameter, rows.is_whole(piece)
                if owner == rank and is_whole:
                    self.kept[index] = True
                for i in range(0 if owner == rank and self.kept[index] else len(layout.nodes[rank])):
                    row = first_own + i if owner == rank else of_owners[owner].row(rank, i)
                    place = rows.place(row, piece)
                    self.targets[i][index].append(_Target(piece.start, piece.stop, is_whole, place))
                    if owner == rank:
                        self.own_places[i, index] = place
        self.own_rows = {
            s: [rows.vector(-1 - s, *piece) for piece in rows.parts[rank]] for s in schedule.sources if s < 0
        }
        """The pieces of this rank in each row, by source."""


class DirectRows(GradientRows[_DirectPlan]):
    """The rows of one engine; see `GradientRows`."""

    def put(self, i: int, index: int, gradient: Tensor | None) -> None:
        """Write the gradient for the ranks that have a part of it; see `GradientRows`."""
        for start, stop, is_whole, place in self._plan.targets[i][index]:
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient if is_whole else run_of(gradient, self.strides[index], start, stop))
        if self._plan.kept[index]:
            self._own[i][index] = gradient

    def put_sum(self, i: int, index: int, left: Tensor, right: Tensor) -> None:
        """Write the sum to the places where it is read, without an intermediate copy; see `GradientRows`."""
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

    def reduce(self, used: Sequence[bool], factor: float) -> None:
        """Sum this rank's gradients and the rows; see `GradientRows`."""
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

    def _count_rows(self) -> int:
        # The rows for the gradients of other ranks, followed by this rank's private ones.
        return AdditionSchedule.most_rows(self.widest) + max(map(len, self.widest.nodes))

    def _make_plan(self, layout: NodeLayout) -> _DirectPlan:
        return _DirectPlan(self, layout)

    def _kept(self, i: int, piece: Piece) -> Tensor:
        place = self._plan.own_places.get((i, piece.parameter))
        if place is not None:
            return place
        gradient = self._own[i][piece.parameter]
        if gradient is None:
            return torch.zeros_like(self.vector(0, *piece))
        return run_of(gradient, self.strides[piece.parameter], piece.start, piece.stop)
