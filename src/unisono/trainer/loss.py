"""What a user's function returned for a micro-batch, turned into a sum and its weight.

The mean is taken over the global batch and not over the micro-batch. So accumulation, ragged last batches and ranks
with fewer samples come out as if one process had computed the batch at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.errors import LossError

__all__ = ["WeightedSum", "weighted_sum"]


class WeightedSum(NamedTuple):
    """Losses (or another value) of one micro-batch."""

    total: Tensor
    """Sum, a scalar."""
    weight: float
    """What to divide sums by: the number of samples, or what the function gave."""


def weighted_sum(result: Any, *, samples: int, what: str = "loss function") -> WeightedSum:
    """Read what a function returned for a micro-batch of so many samples.

    It may return one value per sample (shape [samples]), a scalar, taken as the micro-batch's mean, or a pair (sum,
    weight), for means over tokens or weighted samples. Values of low precision or whole numbers are summed in float32.
    Raises: LossError for anything else.
    """
    if isinstance(result, tuple) and len(result) == 2:
        total, weight = result
        if isinstance(weight, Tensor):
            weight = weight.item()
        if (
            not isinstance(total, Tensor)
            or total.dim()
            or isinstance(weight, bool)
            or not isinstance(weight, (int, float))
        ):
            raise LossError(
                f"the {what} returned a pair of {_describe(total)} and {_describe(weight)}; a pair is (sum, weight): a "
                "scalar tensor with the sum of the losses, and the number to divide it by, such as the count of tokens."
            )
        if not weight >= 0:
            raise LossError(f"the {what} returned weight {weight}; it must be zero or more")
        return WeightedSum(_widened(total), float(weight))
    if not isinstance(result, Tensor):
        raise LossError(
            f"the {what} returned {_describe(result)}; return a tensor: one loss per sample (shape [{samples}] here), "
            "the mean as a scalar, or (sum, weight)."
        )
    if result.dim() == 0:
        return WeightedSum(_widened(result) * samples, float(samples))
    if result.shape != (samples,):
        raise LossError(
            f"the {what} returned shape {list(result.shape)} for a micro-batch of {samples} samples; expected one loss "
            f"per sample, shape [{samples}] (reduction='none', and .mean over other dimensions), the mean as a scalar, "
            "or (sum, weight)."
        )
    return WeightedSum(_widened(result).sum(), float(samples))


def _widened(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _describe(value: Any) -> str:
    return (
        f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"{value!r} ({type(value).__name__})"
    )
