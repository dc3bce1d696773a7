"""Where stages begin, so that the slowest one is as fast as it can be: an exact method on measured times.

A model is a row of segments between places at which a stage may begin. Stages are runs of segments, so dynamic
programming finds the best division among all of them, in O(n² p) for n segments and p stages. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

__all__ = ["ModelSegment", "Split", "balance"]

_SLACK = 0.01
"""How much slower than the best the slowest stage may be if less is then sent between stages."""


class ModelSegment(NamedTuple):
    """A part of the model that no cut divides."""

    name: str
    """The block with which a stage would begin here."""
    forward_s: float
    """Time of one micro-batch."""
    backward_s: float
    state_nbytes: int
    """Memory of parameters, gradients and optimizer state."""
    activation_nbytes: int
    """Memory that one micro-batch keeps until its backward pass."""
    entering_nbytes: int
    """Bytes that a stage receives for one micro-batch if it begins here; gradients of as many go back."""

    @property
    def seconds(self) -> float:
        """Time of both passes."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class Split:
    """A division of segments into stages."""

    begins: tuple[int, ...]
    """The first segment of each stage; the first one is 0."""
    seconds: tuple[float, ...]
    """Of each stage, for both passes of one micro-batch."""
    nbytes: tuple[int, ...]
    """Memory of each stage: its state, and the activations of the micro-batches that are under way."""
    least_s: float
    """A lower bound of the time of the slowest stage in every division, whatever its memory."""

    @property
    def excess(self) -> float:
        """Return by how much the slowest stage is slower than it could ever be; 0.03 for 3 %."""
        return max(self.seconds) / self.least_s - 1 if self.least_s else 0.0


def balance(
    segments: Sequence[ModelSegment],
    stages: int,
    *,
    under_way: Sequence[int],
    limit_nbytes: int | Sequence[int | None] | None = None,
    parts: str = "stages",
) -> Split:
    """Return the division with the fastest slowest stage; among those within 1 %, the one that sends least.

    Args:
        segments: The parts of the model, in order.
        stages: The number of stages.
        under_way: For each stage, how many micro-batches it holds activations of.
        limit_nbytes: The memory that a stage may take, or that each of them may take. None: any.
        parts: What stages are called in messages.

    Raises:
        ValueError: There are fewer segments than stages, or no division keeps the limit; the message has the numbers.

    >>> row = [ModelSegment(f"{i}", 1.0, 2.0, 0, 0, 10) for i in range(4)] + [ModelSegment("head", 4.0, 8.0, 0, 0, 10)]
    >>> found = balance(row, 2, under_way=[2, 1])
    >>> found.begins, found.seconds, found.excess
    ((0, 4), (12.0, 12.0), 0.0)
    """
    if len(segments) < stages:
        raise ValueError(
            f"{stages} {parts} need {stages} places at which one may begin, and the model has {len(segments)}: give "
            f"fewer {parts}, or a model of smaller blocks"
        )
    limits: Sequence[int | None]
    limits = [limit_nbytes] * stages if limit_nbytes is None or isinstance(limit_nbytes, int) else limit_nbytes
    table = _CostTable(segments, under_way, limits)
    bound = table.best_bound(stages)
    if bound is None:
        raise ValueError(_too_little(table, stages, limits, parts))
    begins = table.cheapest(stages, bound * (1 + _SLACK))
    ends = (*begins[1:], len(segments))
    whole = _CostTable(segments, under_way, [None] * stages).best_bound(stages)
    assert whole is not None
    return Split(
        begins,
        tuple(table.seconds(begin, end) for begin, end in zip(begins, ends, strict=True)),
        tuple(table.nbytes(stage, *each) for stage, each in enumerate(zip(begins, ends, strict=True))),
        whole,
    )


class _CostTable:
    """Costs of runs of segments, and the dynamic programs over them."""

    def __init__(
        self, segments: Sequence[ModelSegment], under_way: Sequence[int], limits: Sequence[int | None]
    ) -> None:
        self._segments, self._under_way = segments, under_way
        self._limits = [math.inf if each is None else each for each in limits]
        self._seconds = [0.0, *accumulate(each.seconds for each in segments)]
        self._state = [0, *accumulate(each.state_nbytes for each in segments)]
        self._activation = [0, *accumulate(each.activation_nbytes for each in segments)]

    def seconds(self, begin: int, end: int) -> float:
        return self._seconds[end] - self._seconds[begin]

    def fits(self, stage: int, begin: int, end: int) -> bool:
        return self.nbytes(stage, begin, end) <= self._limits[stage]

    def nbytes(self, stage: int, begin: int, end: int) -> int:
        held = self._activation[end] - self._activation[begin]
        return self._state[end] - self._state[begin] + self._under_way[stage] * held

    def best_bound(self, stages: int) -> float | None:
        """Return the time of the slowest stage in the best division, or None if none keeps the limit."""
        count = len(self._segments)
        best = [0.0] + [math.inf] * count
        for stage in range(stages):
            best = [
                min(
                    (
                        max(best[begin], self.seconds(begin, end))
                        for begin in range(stage, end)
                        if self.fits(stage, begin, end)
                    ),
                    default=math.inf,
                )
                for end in range(count + 1)
            ]
        return None if math.isinf(best[count]) else best[count]

    def cheapest(self, stages: int, bound: float) -> tuple[int, ...]:
        """Return the first segments of the division that sends least, with no stage slower than a bound."""
        count = len(self._segments)
        best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *([(math.inf, ())] * count)]
        for stage in range(stages):
            following: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())] * (count + 1)
            for end in range(stage + 1, count + 1):
                for begin in range(stage, end):
                    sent, begins = best[begin]
                    if self.seconds(begin, end) > bound or not self.fits(stage, begin, end):
                        continue
                    sent += self._segments[begin].entering_nbytes if stage else 0
                    if sent < following[end][0]:
                        following[end] = sent, (*begins, begin)
            best = following
        return best[count][1]


def _mebibytes(nbytes: int) -> str:
    mebibytes = nbytes / 2**20
    return f"{mebibytes:,.0f}" if mebibytes >= 100 else f"{mebibytes:.3g}"


def _too_little(table: _CostTable, stages: int, limits: Sequence[int | None], parts: str) -> str:
    """Describe why no division keeps the limits: what the least one needs where all stages have as much."""
    low, high = 0, max(table.nbytes(stage, 0, len(table._segments)) for stage in range(stages))
    while low < high:
        middle = (low + high) // 2
        if _CostTable(table._segments, table._under_way, [middle] * stages).best_bound(stages) is None:
            low = middle + 1
        else:
            high = middle
    if len(set(limits)) == 1:
        assert limits[0] is not None
        given, each = f"{_mebibytes(limits[0])} MiB each", ""
    else:
        given = ", ".join("any" if limit is None else _mebibytes(limit) for limit in limits) + " MiB"
        each = " of each"
    return (
        f"no division into {stages} {parts} fits {given}: the best one needs {_mebibytes(low)} MiB{each}. Give more "
        f"{parts}, smaller micro-batches, or activation checkpointing"
    )
