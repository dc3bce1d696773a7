"""Curves of any length in bounded memory: buckets of neighbouring steps that keep the least and the greatest value.

Start reading at `downsample`; `Curve` does the same for points that come one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

__all__ = ["Curve", "downsample"]

_MOST = 1000
"""Buckets of a curve: more than a chart has pixels on most screens."""


class Curve:
    """A curve over steps, whose points come in the order of their steps, with at most `most` buckets.

    Each bucket holds as many steps as all others, a power of two that doubles when there are too many buckets. It keeps
    the least and the greatest value, and the mean. Values that are not finite are counted and left out.

    Args:
        most: The greatest number of buckets.

    >>> curve = Curve(most=2)
    >>> for step, loss in enumerate([4.0, 9.0, 2.0, 1.0]):
    ...     curve.add(step, loss)
    >>> [(b[_AT], b[_LOW], b[_HIGH]) for b in curve.buckets], curve.width
    ([(1, 4.0, 9.0), (3, 1.0, 2.0)], 2)
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self.width = 1
        """Steps of a bucket."""
        self.buckets: list[list[Any]] = []
        """[index, last step, least, greatest, sum, count] of each bucket."""
        self.count = 0
        self.last: float | None = None
        self.least: tuple[float, int] | None = None
        """The least value, and its step."""
        self.greatest: tuple[float, int] | None = None
        self.bad = 0
        """Values that are not finite."""
        self.first_bad: int | None = None
        """The step of the first of them."""

    def add(self, step: int, value: float) -> None:
        """Add a point."""
        if not math.isfinite(value):
            if not self.bad:
                self.first_bad = step
            self.bad += 1
            return
        self.count += 1
        self.last = value
        if self.least is None or value < self.least[0]:
            self.least = (value, step)
        if self.greatest is None or value > self.greatest[0]:
            self.greatest = (value, step)
        index = step // self.width
        if self.buckets and self.buckets[-1][_INDEX] >= index:
            last = self.buckets[-1]
            last[_AT] = max(step, last[_AT])
            if value < last[_LOW]:  # noqa: PLR1730  min and max take three times as long, here for each step
                last[_LOW] = value
            if value > last[_HIGH]:  # noqa: PLR1730
                last[_HIGH] = value
            last[_SUM] += value
            last[_COUNT] += 1
            return
        self.buckets.append([index, step, value, value, value, 1])
        while len(self.buckets) > self._most:
            self._double()

    def rewind(self, step: int) -> None:
        """Drop what came after a step, which is about to come again; a bucket that began before it is kept."""
        while self.buckets and self.buckets[-1][_INDEX] * self.width > step:
            self.buckets.pop()
        for name, better in (("least", min), ("greatest", max)):
            extreme = getattr(self, name)
            if extreme is not None and extreme[1] > step:
                column = _LOW if name == "least" else _HIGH
                left = [(bucket[column], bucket[_AT]) for bucket in self.buckets]
                setattr(self, name, better(left) if left else None)

    def document(self) -> dict[str, Any]:
        """Return the curve as lists of numbers, rounded to six digits, which a chart does not show anyway."""
        return {
            "x": [bucket[_AT] for bucket in self.buckets],
            "low": [_short(bucket[_LOW]) for bucket in self.buckets],
            "high": [_short(bucket[_HIGH]) for bucket in self.buckets],
            "mean": [_short(bucket[_SUM] / bucket[_COUNT]) for bucket in self.buckets],
            "width": self.width,
            "count": self.count,
            "last": self.last,
            "least": self.least,
            "greatest": self.greatest,
            "bad": self.bad,
            "first_bad": self.first_bad,
        }

    def _double(self) -> None:
        self.width *= 2
        merged: list[list[Any]] = []
        for index, at, low, high, total, count in self.buckets:
            if merged and merged[-1][_INDEX] == index // 2:
                last = merged[-1]
                last[_AT], last[_LOW], last[_HIGH] = at, min(low, last[_LOW]), max(high, last[_HIGH])
                last[_SUM], last[_COUNT] = last[_SUM] + total, last[_COUNT] + count
            else:
                merged.append([index // 2, at, low, high, total, count])
        self.buckets = merged


_INDEX, _AT, _LOW, _HIGH, _SUM, _COUNT = range(6)


def downsample(points: Iterable[tuple[int, float]], *, most: int = _MOST) -> dict[str, Any]:
    """Return a curve of at most `most` buckets, which keep the least and the greatest value of their steps.

    Pure, in one pass, with O(most) memory.

    Args:
        points: Steps and values, in the order of the steps.
        most: The greatest number of buckets.

    >>> found = downsample([(0, 1.0), (1, 8.0), (2, 2.0), (3, 2.5)], most=2)
    >>> found["x"], found["low"], found["high"], found["mean"]
    ([1, 3], [1.0, 2.0], [8.0, 2.5], [4.5, 2.25])
    """
    curve = Curve(most)
    for step, value in points:
        curve.add(step, value)
    return curve.document()


def _short(value: float) -> float:
    return float(f"{value:.6g}")
