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
        return f"{float(self):.4f} ({_plain(self.total)}/{_plain(self.count)})"

    def __repr__(self) -> str:
        return f"Metric({self.total!r}, {self.count!r})"

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.total, self.count


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:.1f}"
