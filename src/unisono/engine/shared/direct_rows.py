"""Rows for two ranks and a large model: nothing is copied that another rank need not read.

A rank reads its own gradient where backward left it, or in rows of its own where it has but a piece of a parameter: the
rest need not be kept then. It reads those of the others from rows: for each part there is a row for every node of the
tree that another rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.norm import in_memory_order, run_of
from unisono.engine.shared.addition_schedule import AdditionSchedule, add_up
from unisono.engine.shared.gradient_rows import GradientRows
from unisono.engine.shared.partition import Shard
from unisono.engine.tree_all_reduce import NodeLayout

__all__ = ["DirectRows"]


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

    def __init__(self, rows: DirectRows, layout: NodeLayout) -> None:
        rank, first_own = rows.rank, AdditionSchedule.most_rows(rows.widest)
        self.schedule = schedule = AdditionSchedule(layout, rank)
        of_owners = [AdditionSchedule(layout, owner) for owner in range(len(rows.parts))]
        self.targets: list[list[list[_Target]]] = [[[] for _ in rows.strides] for _ in layout.nodes[rank]]
        """By own node and parameter."""
        self.kept = [False] * len(rows.strides)
        """Whether this rank reads a parameter's own gradient where backward left it."""
        self.own_places: dict[tuple[int, int], Tensor] = {}
        """Where the gradient of a piece is kept, by own node and parameter."""
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
        """The pieces of this rank in each row."""


class DirectRows(GradientRows[_DirectPlan]):
    """The rows of one engine; see `GradientRows`."""

    def put(self, i: int, index: int, gradient: Tensor | None) -> None:
        """Write it for the ranks that have a part of it; see `GradientRows`."""
        for start, stop, is_whole, place in self._plan.targets[i][index]:
            if gradient is None:
                place.zero_()
            else:
                place.copy_(gradient if is_whole else run_of(gradient, self.strides[index], start, stop))
        if self._plan.kept[index]:
            self._own[i][index] = gradient

    def put_sum(self, i: int, index: int, left: Tensor, right: Tensor) -> None:
        """Write the sum where it is read, without a copy between; see `GradientRows`."""
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
        """Sum own gradients and rows; see `GradientRows`."""
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
        # Those for the gradients of others, and behind them this rank's own.
        return AdditionSchedule.most_rows(self.widest) + max(map(len, self.widest.nodes))

    def _make_plan(self, layout: NodeLayout) -> _DirectPlan:
        return _DirectPlan(self, layout)

    def _kept(self, i: int, piece: Shard) -> Tensor:
        place = self._plan.own_places.get((i, piece.parameter))
        if place is not None:
            return place
        gradient = self._own[i][piece.parameter]
        if gradient is None:
            return torch.zeros_like(self.vector(0, *piece))
        return run_of(gradient, self.strides[piece.parameter], piece.start, piece.stop)
