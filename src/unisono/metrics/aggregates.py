"""Mean, sum, minimum and maximum over the samples of all ranks.

Floating-point values are added in float64 on the device where they lie (those of MPS, which has no float64, on the
CPU). The sums of the ranks are added exactly and rounded once. Whole numbers stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.metrics.average import Average
from unisono.metrics.metric import Metric

__all__ = ["Max", "Mean", "Min", "Total"]

Value = Tensor | float
Given = Value | Sequence[Any]
"""Values that can be counted: numbers and tensors, and also lists of numbers, and arrays."""
_NOTHING, _WHOLE, _FLOATING = 0, 1, 2
_LOW = 0xFFFFFFFF


class Mean(Metric[Average]):
    """The mean over all samples (or tokens): the sum of all values divided by the sum of their weights.

    It is exact for ranks and batches of different sizes, as a mean of means would not be.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard everything counted so far on this rank."""
        self._total: Tensor = torch.zeros((), dtype=torch.float64)
        self._weight: Value = 0

    @torch.no_grad()
    def update(self, values: Given, weight: Given | None = None) -> None:
        """Count values, each with its weight, on this rank.

        Args:
            values: One value per sample, of any shape; or a number, such as the mean loss of a batch.
            weight: The weight of each value: a number, or a tensor that broadcasts to the shape of values, such as a
                mask of tokens. Values of weight 0 are ignored, so they may be NaN. None means 1. For the mean of a
                batch, give the size of the batch: update(loss, len(batch)).

        Raises:
            ValueError: A weight is negative or NaN (tensors are checked on the CPU alone), or the shape of weight does
                not broadcast to that of values.
            TypeError: The values, or the elements of a weight that is not a tensor, are not real numbers.
        """
        values = _real(values)
        if weight is not None and not isinstance(weight, (int, float, Tensor)):
            weight = _tensor(weight, "weight")
        if weight is None:
            self._add(values.sum(), values.numel())
        elif not isinstance(weight, Tensor):
            if not weight >= 0:
                raise ValueError(f"weight={weight} must be 0 or more")
            if weight:
                self._add(values.sum() * weight, weight * values.numel())
        else:
            if weight.device.type == "cpu" and not (weight >= 0).all():
                raise ValueError("weight has a negative number or NaN in it: all must be 0 or more")
            shape = _broadcast(values.shape, weight.shape)
            if shape is None or (shape != values.shape and values.dim()):
                raise ValueError(f"weight of shape {list(weight.shape)} does not fit values of {list(values.shape)}")
            wide = _real(weight.to(values.device)).expand(shape)
            self._add(torch.where(wide == 0, 0, values * wide).sum(), wide.sum())

    def _add(self, total: Tensor, weight: Value) -> None:
        self._total = self._total.to(total.device) + total
        if isinstance(weight, Tensor) and isinstance(self._weight, Tensor):
            self._weight = self._weight.to(weight.device)
        self._weight = self._weight + weight

    def pack(self) -> tuple[Tensor, Tensor]:
        """Return what this rank has counted, as words."""
        weight = torch.as_tensor(self._weight, dtype=torch.float64, device=self._total.device)
        return torch.empty(0, dtype=torch.int64), torch.stack([self._total, weight]).view(torch.int64)

    def unpack(self, added: Tensor, apart: Tensor) -> None:
        """Set the counts to those of all ranks."""
        total, weight = (_exact_sum(column) for column in apart.contiguous().view(torch.float64).T.tolist())
        self._total = torch.tensor(total, dtype=torch.float64)
        self._weight = weight

    def local(self) -> Average:
        """Return the value over the samples of this rank alone."""
        return Average(float(self._total), float(self._weight))

    def __repr__(self) -> str:
        return "Mean()"


class Total(Metric[float]):
    """The sum over all samples.

    A sum of whole numbers is exact and whole, also beyond 64 bits, up to 2**94.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard everything counted so far on this rank."""
        self._whole = 0
        self._halves: Tensor | None = None
        """The sum on an accelerator: multiples of 2**32, and the rest."""
        self._floating: Tensor | None = None

    @torch.no_grad()
    def update(self, values: Given) -> None:
        """Add a number, or all elements of a tensor, on this rank.

        Raises:
            TypeError: The values are not real numbers.
        """
        if not isinstance(values, (int, float, Tensor)):
            values = _tensor(values)
        if isinstance(values, int):
            self._whole = self._whole + values
        elif isinstance(values, Tensor) and not values.is_floating_point() and not values.is_complex():
            halves = _halves_of(values)
            if halves.device.type == "cpu":
                self._whole += _of_halves(halves)
            elif self._halves is None:
                self._halves = halves
            else:  # without waiting for the device
                halves = self._halves.to(halves.device) + halves
                carry = halves[1] >> 32
                self._halves = torch.stack([halves[0] + carry, halves[1] & _LOW])
        else:
            total = _real(values).sum()
            self._floating = total if self._floating is None else self._floating.to(total.device) + total

    def pack(self) -> tuple[Tensor, Tensor]:
        """Return what this rank has counted, as words."""
        total = self._total()
        if not -(2**94) <= total < 2**94:
            raise OverflowError(f"the sum of this rank, {total}, does not fit 95 bits: add floating-point numbers")
        floating = self._floating if self._floating is not None else torch.zeros((), dtype=torch.float64)
        device = floating.device
        numbers = torch.tensor([total >> 32, total & _LOW, int(self._floating is not None)], device=device)
        return torch.empty(0, dtype=torch.int64), torch.cat([numbers, floating.view(1).view(torch.int64)])

    def unpack(self, added: Tensor, apart: Tensor) -> None:
        """Set the counts to those of all ranks."""
        self._whole, self._halves = sum(_of_halves(row) for row in apart[:, :2]), None
        floating = _exact_sum(apart[:, 3].contiguous().view(torch.float64).tolist())
        self._floating = torch.tensor(floating, dtype=torch.float64) if apart[:, 2].any() else None

    def local(self) -> float:
        """Return the value over the samples of this rank alone."""
        whole = self._total()
        return whole if self._floating is None else whole + float(self._floating)

    def _total(self) -> int:
        return self._whole + (0 if self._halves is None else _of_halves(self._halves))

    def __repr__(self) -> str:
        return "Total()"


class _Extreme(Metric[float]):
    """A minimum or maximum. NaN among the values makes it NaN, as in torch."""

    _of_tensor: Callable[[Tensor], Tensor]
    _of_list: Callable[..., float]

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard everything counted so far on this rank."""
        self._best: Tensor | None = None

    @torch.no_grad()
    def update(self, values: Given) -> None:
        """Count a number, or all elements of a tensor, which may be empty, on this rank.

        Raises:
            TypeError: The values are not real numbers.
        """
        if not isinstance(values, (float, Tensor)):
            values = _tensor(values)
        if isinstance(values, Tensor) and not values.is_floating_point() and not values.is_complex():
            wide = values.to(torch.int64)
        else:
            wide = _real(values)
        if not wide.numel():
            return
        found = type(self)._of_tensor(wide)
        if self._best is not None:
            both = torch.cat([self._best.to(found.device).view(1), found.view(1)])  # of mixed types: float64
            found = type(self)._of_tensor(both)
        self._best = found

    def pack(self) -> tuple[Tensor, Tensor]:
        """Return what this rank has counted, as words."""
        best = torch.zeros((), dtype=torch.int64) if self._best is None else self._best
        kind = _NOTHING if self._best is None else _FLOATING if best.is_floating_point() else _WHOLE
        return torch.empty(0, dtype=torch.int64), torch.stack(
            [torch.tensor(kind, device=best.device), best.view(torch.int64)]
        )

    def unpack(self, added: Tensor, apart: Tensor) -> None:
        """Set the counts to those of all ranks."""
        floating = apart[:, 1].contiguous().view(torch.float64).tolist()
        found = [
            whole if kind == _WHOLE else real
            for kind, whole, real in zip(apart[:, 0].tolist(), apart[:, 1].tolist(), floating, strict=True)
            if kind != _NOTHING
        ]
        if not found:
            self._best = None
            return
        best = math.nan if any(math.isnan(value) for value in found) else type(self)._of_list(found)
        floats = any(isinstance(value, float) for value in found)
        self._best = torch.tensor(best, dtype=torch.float64 if floats else torch.int64)

    def local(self) -> float:
        """Return the value over the samples of this rank alone."""
        best: float = math.nan if self._best is None else self._best.item()
        return best

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Min(_Extreme):
    """The smallest value of all ranks; NaN if there is none. The smallest of whole numbers is whole."""

    _of_tensor = staticmethod(torch.amin)
    _of_list = staticmethod(min)


class Max(_Extreme):
    """The largest value of all ranks; NaN if there is none. The largest of whole numbers is whole."""

    _of_tensor = staticmethod(torch.amax)
    _of_list = staticmethod(max)


def _real(values: Any) -> Tensor:
    """Return values in float64.

    Raises:
        TypeError: The values are not real numbers.
    """
    if not isinstance(values, (int, float)):
        values = _tensor(values)
        if values.is_complex():
            raise TypeError(f"values are {values.dtype}, and complex numbers have no mean or order: count their abs()")
        if values.device.type == "mps":  # has no float64
            values = values.cpu()
    return torch.as_tensor(values, dtype=torch.float64)


def _broadcast(first: torch.Size, second: torch.Size) -> torch.Size | None:
    """Return the shape that two shapes broadcast to; None if they do not."""
    try:
        shape: torch.Size = torch.broadcast_shapes(first, second)  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None
    return shape


def _halves_of(values: Tensor) -> Tensor:
    """Return the exact sum of whole numbers as two numbers, of which the first counts multiples of 2**32."""
    if values.dtype == torch.uint64:
        words = values.view(torch.int64)
        high = (words >> 32) & _LOW
    elif values.dtype == torch.int64:
        words = values
        high = words >> 32
    else:  # too small to fill 64 bits
        total = values.sum(dtype=torch.int64)
        return torch.stack([total >> 32, total & _LOW])
    low = (words & _LOW).sum()
    return torch.stack([high.sum() + (low >> 32), low & _LOW])


def _of_halves(halves: Tensor) -> int:
    high, low = halves.tolist()
    return int((high << 32) + low)


def _tensor(values: Any, name: str = "values") -> Tensor:
    """Return values as a tensor; floating-point numbers that are no tensor yet become float64, to keep all digits.

    Raises:
        TypeError: torch cannot make a tensor of them.
    """
    if isinstance(values, Tensor):
        return values
    try:
        found = torch.as_tensor(values)
        return torch.as_tensor(values, dtype=torch.float64) if found.is_floating_point() else found
    except (TypeError, ValueError, RuntimeError):
        what = "does not fit 64 bits" if isinstance(values, int) else f"is of type {type(values).__name__}"
        raise TypeError(f"{name}={values!r} {what}: give a tensor, a number, or a list of numbers") from None


def _exact_sum(numbers: list[Any]) -> float:
    """Return the sum, rounded once. If a number is not finite, add them in order, since fsum refuses inf - inf."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
