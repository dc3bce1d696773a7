"""What a user's function returned for a micro-batch, as a sum and a plain number to divide sums by."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from unisono.errors import LossError
from unisono.parallel.losses import read

__all__ = ["WeightedSum", "weighted_sum"]


class WeightedSum(NamedTuple):
    """Losses (or another value) of one micro-batch."""

    total: Tensor
    """Sum, a scalar."""
    weight: float
    """What to divide sums by: the number of samples, or what the function gave."""


def weighted_sum(result: Any, *, samples: int, what: str = "loss function") -> WeightedSum:
    """Read what a function returned for a micro-batch; the forms are those of `unisono.parallel.losses.read`.

    Raises:
        LossError: The function returned none of them.
    """
    total, weight = read(result, samples=samples, what=what)
    if isinstance(weight, Tensor):
        weight = float(weight.item())
        if not 0 <= weight < float("inf"):
            raise LossError(f"the {what} returned weight {weight}; it must be finite, and zero or more.")
    return WeightedSum(total, weight)
