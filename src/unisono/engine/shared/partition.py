"""Divides the parameters among the ranks that update them. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Piece", "assign_whole", "partition"]


class Piece(NamedTuple):
    """A range of one parameter's elements, in memory order: start <= element < stop."""

    parameter: int
    """The number of the parameter."""
    start: int
    stop: int


def partition(numels: Sequence[int], *, ranks: int, unit: int) -> list[list[Piece]]:
    """Divide parameters evenly; one that is longer than a unit may be cut at multiples of the unit.

    A parameter without elements has a piece, too, since optimizers keep state for it. No other piece is empty.

    >>> [[tuple(piece) for piece in pieces] for pieces in partition([100, 300, 0], ranks=2, unit=64)]
    [[(0, 0, 100), (1, 0, 128)], [(1, 128, 300), (2, 0, 0)]]
    """
    if not numels:
        return [[] for _ in range(ranks)]
    ends = [0]
    for numel in numels:
        ends.append(ends[-1] + numel)
    cuts = [0]
    index = 0
    for rank in range(1, ranks):
        ideal = ends[-1] * rank // ranks
        while index < len(numels) - 1 and ends[index + 1] <= ideal:
            index += 1
        numel, offset = numels[index], ideal - ends[index]
        nearest = min((offset + unit // 2) // unit * unit, numel)
        if numel - offset < abs(nearest - offset):
            nearest = numel
        cuts.append(max(ends[index] + nearest, cuts[-1]))
    cuts.append(ends[-1] + 1)  # so that empty parameters at the very end belong to the last rank
    return [
        [
            Piece(i, max(first - start, 0), min(last, stop) - start)
            for i, (start, stop) in enumerate(pairwise(ends))
            if max(first, start) < min(last, stop) or first <= start == stop < last
        ]
        for first, last in pairwise(cuts)
    ]


def assign_whole(numels: Sequence[int], *, ranks: int) -> list[list[Piece]]:
    """Assign whole parameters to ranks, each time the largest to the rank with the fewest elements so far.

    (Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969: at most 4/3 of the best.)

    >>> [[piece.parameter for piece in pieces] for pieces in assign_whole([10, 50, 30, 30], ranks=2)]
    [[0, 1], [2, 3]]
    """
    loads = [0] * ranks
    owners = [0] * len(numels)
    for i in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += numels[i]
    return [[Piece(i, 0, numels[i]) for i in range(len(numels)) if owners[i] == rank] for rank in range(ranks)]
