"""The operations that combine values of several ranks, by name, for tensors and for Python numbers.

Pure: nothing here communicates. Backends add only some types of numbers; `carrier_of` returns the type as which a
tensor travels so that the result is right on all of them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Op", "OpName", "combine_numbers", "combine_tensors", "read_op"]

OpName = Literal["sum", "mean", "min", "max", "product", "band", "bor", "bxor"]
Op = OpName | dist.ReduceOp | dist.ReduceOp.RedOpType
"""An operation: its name, or torch's `ReduceOp`."""

NAMES: tuple[OpName, ...] = get_args(OpName)
_TORCHS: dict[Any, OpName] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
WIRE_OPS: dict[OpName, Any] = {name: op for op, name in _TORCHS.items()} | {"mean": dist.ReduceOp.SUM}
"""The operation that torch runs. A mean is a sum that is divided here: not every backend has one."""
BITWISE = frozenset({"band", "bor", "bxor"})
_UNORDERED = frozenset({"min", "max"})


def read_op(op: Op) -> OpName:
    """Return the name of an operation.

    Raises:
        ValueError: The operation is unknown.

    >>> read_op("sum"), read_op(dist.ReduceOp.AVG)
    ('sum', 'mean')
    """
    if isinstance(op, str):
        if op in NAMES:
            return op
        raise ValueError(f"op={op!r} is not known: give one of {', '.join(NAMES)}")
    found = _TORCHS.get(getattr(op, "op", op)) if isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)) else None
    if found is None:
        raise ValueError(f"op={op!r} is not known: give one of {', '.join(NAMES)}")
    return found


def check_dtype(dtype: torch.dtype, op: OpName, what: str) -> None:
    """Check that an operation can combine tensors of a type; `what` names the tensor in messages.

    Raises:
        TypeError: It cannot.
    """
    floating = dtype.is_floating_point or dtype.is_complex
    if op == "mean" and not floating:
        raise TypeError(f"{what} is {name_of(dtype)}, which has no mean: convert it by .float(), or take the sum")
    if op in BITWISE and floating:
        raise TypeError(f"{what} is {name_of(dtype)}, and {op!r} is for whole numbers and bool")
    if op in _UNORDERED and dtype.is_complex:
        raise TypeError(f"{what} is {name_of(dtype)}, and complex numbers have no {op}")
    if dtype.is_floating_point and dtype.itemsize == 1:
        raise TypeError(f"{what} is {name_of(dtype)}, which no backend adds: convert it by .float()")


def carrier_of(dtype: torch.dtype, op: OpName) -> torch.dtype:
    """Return the type as which a tensor travels, which every backend can combine.

    A sum or product of bool counts, as `torch.sum` does, and stays int64.

    >>> carrier_of(torch.int16, "sum"), carrier_of(torch.bool, "max"), carrier_of(torch.bool, "sum")
    (torch.int32, torch.uint8, torch.int64)
    """
    if dtype == torch.bool:
        return torch.int64 if op in ("sum", "product") else torch.uint8
    return _CARRIERS.get(dtype, dtype)


_CARRIERS = {
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
}
_SIGN = -(2**63)


def load(tensor: Tensor, carrier: torch.dtype, op: OpName) -> Tensor:
    """Convert a tensor to the type as which it travels."""
    if tensor.dtype == torch.uint64:
        # The same bits, so that sums wrap in the same way. With the first bit flipped, the order is the same too.
        bits = tensor.view(torch.int64)
        return bits ^ _SIGN if op in _UNORDERED else bits
    return tensor.to(carrier)


def unload(tensor: Tensor, dtype: torch.dtype, op: OpName) -> Tensor:
    """Convert a combined tensor back from the type as which it travels."""
    if dtype == torch.bool:
        return tensor if op in ("sum", "product") else tensor.to(torch.bool)
    if dtype == torch.uint64:
        return (tensor ^ _SIGN if op in _UNORDERED else tensor).view(torch.uint64)
    return tensor.to(dtype)


def combine_tensors(tensors: Sequence[Tensor], op: OpName) -> Tensor:
    """Combine tensors of one shape in their order, as a backend would: in their own type, with a mean as a sum."""
    return functools.reduce(_PAIRWISE[op], tensors)


_PAIRWISE: dict[OpName, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def combine_numbers(numbers: Sequence[int | float], op: OpName) -> int | float:
    """Combine Python numbers, one of each rank, as Python would.

    Whole numbers are exact, whatever their size. A sum or mean of floats is rounded once, so that their order does not
    matter. bool counts in a sum, and stays bool under min, max and the bitwise operations.

    Raises:
        TypeError: The operation is bitwise and a number is a float.

    >>> combine_numbers([2**62, 2**62, 1], "sum") - 2**63, combine_numbers([True, False], "max")
    (1, True)
    >>> combine_numbers([1e16, 1.0, -1e16], "sum"), combine_numbers([1, 2], "mean")
    (1.0, 1.5)
    """
    if op in BITWISE:
        return functools.reduce(_BITWISE[op], numbers)  # type: ignore[arg-type]
    if op == "product":
        return math.prod(numbers)
    if op in _UNORDERED:
        nan = next((x for x in numbers if x != x), None)  # noqa: PLR0124  as in a tensor, NaN wins
        return nan if nan is not None else (min if op == "min" else max)(numbers)
    total = _sum(numbers)
    return total / len(numbers) if op == "mean" else total


_BITWISE: dict[str, Callable[[int, int], int]] = {"band": operator.and_, "bor": operator.or_, "bxor": operator.xor}


def _sum(numbers: Sequence[int | float]) -> int | float:
    if not any(isinstance(x, float) for x in numbers):
        return sum(numbers)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond the largest float on the way, or infinities of both signs
        return sum(float(x) for x in numbers)


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, without "torch.".

    >>> name_of(torch.float32)
    'float32'
    """
    return str(dtype).removeprefix("torch.")
