"""Quantiles of any number of durations in bounded memory: a histogram whose bins are 2 % wide."""

from __future__ import annotations

import math
from collections import Counter

__all__ = ["StepTimes"]

_WIDTH = math.log(1.02)


class StepTimes:
    """The distribution of durations, with quantiles that are right to 1 %.

    >>> times = StepTimes()
    >>> for ms in range(1, 101):
    ...     times.add(ms / 1000)
    >>> round(times.quantile(0.5), 3), round(times.quantile(0.95), 3)
    (0.05, 0.095)
    """

    def __init__(self) -> None:
        self._bins: Counter[int] = Counter()
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Add a duration; those that are not positive count as a nanosecond."""
        self._bins[round(math.log(max(seconds, 1e-9)) / _WIDTH)] += 1
        self.count += 1
        self.total_s += seconds

    def quantile(self, part: float) -> float:
        """Return the duration below which a part of all lie, in seconds; NaN if there are none."""
        left = part * self.count
        for bin_ in sorted(self._bins):
            left -= self._bins[bin_]
            if left <= 0:
                return math.exp(bin_ * _WIDTH)
        return math.nan
