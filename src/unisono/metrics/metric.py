"""`Metric`: a mean that still knows what it is the mean of."""

from __future__ import annotations

import math

__all__ = ["Metric"]


class Metric(float):
    """A mean over samples (or tokens) of all ranks. It is a float that knows its sum and count.

    The mean of truth values prints with the two counts behind it.

    >>> accuracy = Metric(350, 360)
    >>> print(accuracy, Metric(238230.2, 78592))
    0.9722 (350/360) 3.0312
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
        shares = all(math.isfinite(number) and number == int(number) for number in (self.total, self.count))
        counts = f" ({int(self.total)}/{int(self.count)})" if shares and 0 <= self.total <= self.count else ""
        return _digits(float(self)) + counts

    def __repr__(self) -> str:
        return f"Metric({self.total!r}, {self.count!r})"

    def __getnewargs__(self) -> tuple[float, float]:  # type: ignore[override]
        return self.total, self.count


def _digits(value: float) -> str:
    """Write four digits after the point, or in all where those would say nothing."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
