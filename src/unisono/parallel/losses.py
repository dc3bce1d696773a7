"""The forms in which a user's function may return its values for some samples, each turned into a sum and its weight.

The mean is taken over the global batch and not over the micro-batch. So accumulation, ragged last batches and ranks
with fewer samples give the result of one process that computes the whole batch at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.errors import LossError
from unisono.text import a_type

__all__ = ["Sum", "WeightedSum", "further_values", "loss_of", "read_loss"]


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum over samples or tokens and the weight to divide it by, returned by a loss or evaluation function.

    It makes a mean over tokens or weighted samples exact over the global batch: the sum of all sums divided by the sum
    of all weights.

    Args:
        total: The sum of the losses (or other values), a scalar tensor.
        weight: The number to divide it by, zero or more, such as the count of tokens; a number or a scalar tensor.
    """

    total: Tensor
    weight: float | Tensor


class WeightedSum(NamedTuple):
    """The result of a function for some samples."""

    total: Tensor
    """The sum, a scalar."""
    weight: float | Tensor
    """The divisor of the sum: the number of samples, or the weight that the function returned."""
    losses: Tensor | None = None
    """The losses of the samples, to run backward from, if `total` was computed without a graph; otherwise None."""

    def weight_number(self, what: str = "loss function") -> float:
        """Return the weight as a number, which waits for the device if it is a tensor on a GPU.

        Args:
            what: The function, for messages.

        Raises:
            LossError: The weight is negative or not finite.
        """
        return _checked(float(self.weight), what)


def read_loss(result: Any, *, samples: int, what: str = "loss function", needs_graph: bool = True) -> WeightedSum:
    """Convert the result of a function for some samples to a sum and its weight.

    Args:
        result: One value per sample (shape [samples]), a scalar, taken as the mean of these samples, or a `Sum`.
            Values of low precision or whole numbers are summed in float32.
        samples: The number of samples the function was given.
        what: The function, for messages.
        needs_graph: False to sum one loss per sample without a graph, which takes less time.

    Raises:
        LossError: The function returned something else.
    """
    if isinstance(result, Tensor):
        wide = _widened(result, what)
        if not wide.dim():
            return WeightedSum(wide * samples, float(samples))
        if wide.shape == (samples,):
            if needs_graph:
                return WeightedSum(wide.sum(), float(samples))
            return WeightedSum(wide.detach().sum(), float(samples), wide)
        raise LossError(_wrong_shape(list(wide.shape), samples, what))
    if not isinstance(result, Sum):
        raise LossError(f"the {what} returned {_other(result, samples)}")
    total, weight = result.total, result.weight
    if not isinstance(total, Tensor) or total.dim():
        raise LossError(
            f"the {what} returned unisono.Sum with {_describe(total)} as its total; give the sum of the losses as a "
            "scalar tensor, such as losses.sum()."
        )
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise LossError(
                f"the {what} returned unisono.Sum with {_describe(weight)} as its weight; give one number, such as "
                "weights.sum()."
            )
        weight = weight.detach()
    elif isinstance(weight, bool) or not hasattr(weight, "__float__"):
        raise LossError(
            f"the {what} returned unisono.Sum with the weight {_describe(weight)}; give the number to divide the sum "
            "by, such as the count of tokens."
        )
    else:
        weight = _checked(float(weight), what)
    return WeightedSum(_widened(total, what), weight)


def loss_of(result: Any) -> Any:
    """Return the entry "loss" of a mapping, such as the outputs of transformers, and any other value unchanged.

    Raises:
        LossError: The mapping has no such entry.
    """
    if isinstance(result, Tensor) or not isinstance(result, Mapping):
        return result
    if "loss" not in result:
        names = ", ".join(repr(key) for key in result) or "none"
        raise LossError(
            f'the loss function returned {a_type(result)} without the entry "loss" (entries: {names}); name the loss '
            '"loss". With a model of transformers, give it the labels.'
        )
    return result["loss"]


def further_values(result: Any) -> Mapping[str, Any]:
    """Return the entries besides "loss" of a plain dict, which a loss function gives to be averaged.

    Mappings of other classes, such as the outputs of transformers, have their loss taken and nothing else.

    >>> further_values({"loss": 0.1, "accuracy": 1.0})
    {'accuracy': 1.0}
    """
    if type(result) is not dict:
        return {}
    return {str(name): value for name, value in result.items() if name != "loss"}


def _checked(weight: float, what: str) -> float:
    if not 0 <= weight < float("inf"):
        raise LossError(f"the {what} returned weight {weight}; it must be finite, and zero or more.")
    return weight


def _widened(values: Tensor, what: str) -> Tensor:
    if values.dtype in (torch.float32, torch.float64):
        return values
    if values.is_complex():
        raise LossError(f"the {what} returned complex numbers ({values.dtype}); return real ones, such as .abs().")
    return values.float()


def _wrong_shape(shape: list[int], samples: int, what: str) -> str:
    if shape[:1] == [samples] and all(size == 1 for size in shape[1:]):
        remedy = f"take the other dimensions away, with .view({samples})"
    else:
        remedy = "reduction='none', and .mean over other dimensions"
    return (
        f"the {what} returned shape {shape} for a micro-batch of {samples} samples; expected one loss per sample, "
        f"shape [{samples}] ({remedy}), the mean as a scalar, or unisono.Sum(total, weight) for a mean over tokens."
    )


def _other(value: Any, samples: int) -> str:
    """Return a description of a result that is no loss, and of what to return in its place."""
    if isinstance(value, tuple):
        return (
            f"a tuple of {len(value)} values, which may mean several things. Return "
            '{"loss": loss, ...} to go with further values, or unisono.Sum(total, weight) for a sum of losses and the '
            "number to divide it by."
        )
    if isinstance(value, list):
        return (
            f"a list of {len(value)} values; return one tensor: torch.stack(losses) for one loss per sample, or the "
            "sum of several losses."
        )
    if isinstance(value, (int, float)) or type(value).__module__ == "numpy":
        return (
            f"{_describe(value)}, which is no tensor and has no gradient; leave out .item() and .numpy(), and "
            f"return the tensor: one loss per sample (shape [{samples}] here), or the mean as a scalar."
        )
    if isinstance(value, Mapping):
        return f"{a_type(value)} in place of a value; return a tensor, or unisono.Sum(total, weight)."
    return (
        f"{_describe(value)}; return a tensor: one loss per sample (shape [{samples}] here), the mean as a scalar, or "
        "unisono.Sum(total, weight)."
    )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if type(value).__module__ == "numpy" and hasattr(value, "shape") and value.shape:
        return f"a numpy array of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"
