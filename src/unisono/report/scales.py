"""Axes: round numbers, and positions on a linear or logarithmic scale. Pure; `page.js` has the same in JavaScript."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Scale", "format_tick", "value_scale"]


class Scale(NamedTuple):
    """The range of an axis.

    >>> Scale(0.0, 10.0, False).ticks(), Scale(0.01, 10.0, True).ticks()
    ([0.0, 2.0, 4.0, 6.0, 8.0, 10.0], [0.01, 0.1, 1.0, 10.0])
    """

    low: float
    high: float
    is_log: bool

    def at(self, value: float) -> float:
        """Return the position of a value, 0 to 1 within the range."""
        if self.is_log:
            value = math.log(max(value, 1e-300))
            low, high = math.log(self.low), math.log(self.high)
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low) if high > low else 0.5

    def step(self) -> float:
        """Return the distance of the ticks of a linear axis; 0 where there is none."""
        ticks = self.ticks()
        return 0.0 if self.is_log or len(ticks) < 2 else ticks[1] - ticks[0]

    def ticks(self, most: int = 6) -> list[float]:
        """Return round numbers within the range, ascending."""
        if self.is_log:
            powers = range(math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1)
            if len(powers) >= 2:
                stride = math.ceil(len(powers) / most)
                return [10.0**power for power in powers if power % stride == 0 or stride == 1]
        span = self.high - self.low
        if not span > 0:
            return [self.low]
        raw = span / (most - 1)
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def value_scale(lows: Sequence[float], highs: Sequence[float]) -> Scale:
    """Return a scale for values: logarithmic if all are positive and they span more than two decades.

    >>> value_scale([1.0, 0.5], [2.0, 0.9])
    Scale(low=0.425, high=2.075, is_log=False)
    >>> value_scale([3.0], [3.0])
    Scale(low=2.7, high=3.3, is_log=False)
    """
    low, high = min(lows), max(highs)
    if low > 0 and high / low > 100:
        margin = (high / low) ** 0.05
        return Scale(low / margin, high * margin, True)
    is_flat = high - low <= abs(high) * 1e-9
    margin = (abs(high) * 0.1 or 1.0) if is_flat else 0.05 * (high - low)
    bottom = low - margin
    if low >= 0 > bottom:
        bottom = 0.0
    return Scale(bottom, high + margin, False)


def format_tick(value: float, step: float = 0.0) -> str:
    """Return a number at an axis, short, but with the digits that distinguish it from its neighbours.

    Args:
        value: The number.
        step: The distance of its neighbours; 0 if there are none.

    >>> [format_tick(v) for v in (0.0, 0.30000000000000004, 0.0001, 20.0, 1500.0, 1e6, 2.5e9)]
    ['0', '0.3', '1e-4', '20', '1.5k', '1M', '2.5G']
    >>> format_tick(400_020_000.0, 20_000.0), format_tick(0.95002, 0.00002), format_tick(6e-14, 2e-14)
    ('400.02M', '0.95002', '6e-14')
    >>> format_tick(0.1 - 0.3 + 0.2, 0.1)
    '0'
    """
    size = abs(value)
    if size <= 1e-12 * step:
        return "0"
    digits = 4 if not step else min(15, max(4, math.ceil(math.log10(size / step)) + 2))
    for unit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if unit <= size < 1e13:
            return f"{value / unit:.{digits}g}{sign}"
    if not size:
        return "0"
    if size < 1e-3 or size >= 1e13:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.{digits}g}"
