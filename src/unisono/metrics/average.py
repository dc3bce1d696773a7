"""`Average`: a mean that keeps its sum and its count."""

from __future__ import annotations

import math

__all__ = ["Average"]


class Average(float):
    """A mean over the samples (or tokens) of all ranks: a float with the attributes `total` and `count`.

    It prints with both if they are whole and `total` is from 0 to `count`, as for the mean of truth values.

    >>> accuracy = Average(350, 360)
    >>> print(accuracy, Average(238230.2, 78592))
    0.9722 (350/360) 3.0312
    >>> accuracy > 0.97, round(accuracy, 2)
    (True, 0.97)
    """

    total: float
    """The sum of the values."""
    count: float
    """The number of samples, or the sum of the weights."""

    def __new__(cls, total: float, count: float) -> Average:
        """Return total divided by count; NaN if count is zero."""
        metric = super().__new__(cls, total / count if count else math.nan)
        metric.total, metric.count = total, count
        return metric

    def __str__(self) -> str:
        shares = all(math.isfinite(number) and number == int(number) for number in (self.total, self.count))
        counts = f" ({int(self.total)}/{int(self.count)})" if shares and 0 <= self.total <= self.count else ""
        return _digits(float(self)) + counts

    def __repr__(self) -> str:
        return f"Average({self.total!r}, {self.count!r})"

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.total, self.count


def _digits(value: float) -> str:
    """Format a number with four decimals, or with four significant digits if it is very small or very large."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
