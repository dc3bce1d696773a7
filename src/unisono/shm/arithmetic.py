"""Reductions of values of several ranks: `torch.distributed.ReduceOp` as torch operations, in the order of ranks.

Sums and products of 16-bit floating-point numbers are computed in float32 and rounded once. All ranks compute the same
steps in the same order, so all get the same bits, however a tensor is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Arithmetic", "arithmetic", "premultiplier"]

_LOW = (torch.float16, torch.bfloat16)
_FLOATS = (*_LOW, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

_ALL = (*_FLOATS, *_COMPLEX, *_INTEGERS, torch.bool)
_TAKEN: dict[str, tuple[torch.dtype, ...]] = {
    "SUM": _ALL,
    "PRODUCT": _ALL,
    "AVG": (*_FLOATS, *_COMPLEX),
    "PREMUL_SUM": (*_FLOATS, *_COMPLEX),
    "MIN": (*_FLOATS, *_INTEGERS, torch.bool),
    "MAX": (*_FLOATS, *_INTEGERS, torch.bool),
    "BAND": (*_INTEGERS, torch.bool),
    "BOR": (*_INTEGERS, torch.bool),
    "BXOR": (*_INTEGERS, torch.bool),
}
_COMBINE: dict[str, Callable[..., Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


class Arithmetic:
    """A reduction for one dtype and number of ranks. Created by `arithmetic`."""

    __slots__ = ("_combine", "_divisor", "_wide")

    def __init__(self, op: str, dtype: torch.dtype, size: int) -> None:
        self._combine = _COMBINE[op]
        self._divisor = size if op == "AVG" else 1
        # With two values the result is rounded once anyway.
        self._wide = dtype in _LOW and op in ("SUM", "AVG", "PREMUL_SUM", "PRODUCT") and (size > 2 or op == "AVG")

    def __call__(self, sources: Sequence[Tensor], out: Tensor) -> None:
        """Combine tensors of one shape, in their order, into `out`, which may be one of the first two of them only."""
        combine = self._combine
        if len(sources) == 1:
            if out is not sources[0]:
                out.copy_(sources[0])
            return
        if self._wide:
            total = sources[0].float()
            for source in sources[1:]:
                combine(total, source, out=total)
            if self._divisor != 1:
                total.div_(self._divisor)
            out.copy_(total)
            return
        combine(sources[0], sources[1], out=out)
        for source in sources[2:]:
            combine(out, source, out=out)
        if self._divisor != 1:
            # Real and imaginary parts separately, as torch averages complex numbers elsewhere: the bits are the same.
            (torch.view_as_real(out) if out.is_complex() else out).div_(self._divisor)


@lru_cache(maxsize=256)
def arithmetic(op: str, dtype: torch.dtype, size: int) -> Arithmetic:
    """Return the reduction for a dtype and a number of ranks.

    Raises:
        RuntimeError: There is no such reduction for this dtype. torch's backends raise the same type.

    >>> out = torch.empty(2, dtype=torch.bfloat16)
    >>> arithmetic("AVG", torch.bfloat16, 2)([torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()], out)
    >>> out
    tensor([0.5000, 0.5000], dtype=torch.bfloat16)
    """
    taken = _TAKEN.get(op)
    if taken is None:
        raise RuntimeError(f"shm has no ReduceOp.{op}: it takes {', '.join(_TAKEN)}")
    if dtype not in taken:
        names = ", ".join(str(d).removeprefix("torch.") for d in taken)
        raise RuntimeError(f"shm cannot use ReduceOp.{op} with {dtype}: it takes {names}")
    return Arithmetic(op, dtype, size)


def premultiplier(reduce_op: Any) -> float | Tensor:
    """Return the factor of a `PREMUL_SUM`."""
    factor = getattr(reduce_op, "factor", None)
    if factor is None:  # before 2.12 torch exposes it only to pickle
        factor = reduce_op.__getstate__()[-1]
    return factor  # type: ignore[no-any-return]
