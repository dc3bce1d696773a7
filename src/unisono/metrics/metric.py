"""`Metric`: a mean that still knows what it is the mean of."""

from __future__ import annotations

import math

__all__ = ["Metric"]


class Metric(float):
    """A mean over samples (or tokens) of all ranks. It is a float, and prints with its sum and count.

    >>> accuracy = Metric(350, 360)
    >>> print(accuracy)
    0.9722 (350/360)
    >>> accuracy > 0.97, round(accuracy, 2)
    (True, 0.97)
    """

    total: float
    """Sum of the values."""
    count: float
    """Number of samples, or sum of the weights."""

    def __new__(cls, total: float, count: float) -> Metric:
        """Divide total by count; NaN if count is zero."""
        metric = super().__new__(cls, total / count if count else math.nan)
        metric.total, metric.count = total, count
        return metric

    def __str__(self) -> str:
        return f"{_digits(float(self))} ({_plain(self.total)}/{_plain(self.count)})"

    def __repr__(self) -> str:
        return f"Metric({self.total!r}, {self.count!r})"

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.total, self.count


def _digits(value: float) -> str:
    """Write four digits after the point, or in all where those would say nothing."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"


def _plain(value: float) -> str:
    if float(value).is_integer():
        return str(int(value)) if abs(value) < 1e15 else f"{value:.4g}"
    return f"{value:.1f}" if 0.1 <= abs(value) < 1e9 else f"{value:.4g}"
