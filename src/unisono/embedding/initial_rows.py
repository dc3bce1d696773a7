"""The first values of rows of dynamic tables: a function of the seed and the id alone.

So it does not matter which rank, step or sample names an id first, and a row need not exist to be read. A value is the
sum of the four 16-bit parts of a 64-bit hash, centred and scaled, which is close to a normal distribution (Irwin-Hall:
excess kurtosis -0.3, no value beyond 3.47 standard deviations). Logarithms and cosines would round differently in
vector and in scalar code, so that a row would depend on its place in the batch; here, all is exact but one
multiplication. The hash is SplitMix64 (Steele, Lea and Flood 2014). A compiled function has the same bits as torch's
operations: it computes a value in registers, where these write and read eight tensors of the size of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.embedding.compiled_ids import initial_by_compiled, is_searchable
from unisono.embedding.id_search_code import FIRST_FACTOR, GOLDEN, PART_BITS, PARTS, SECOND_FACTOR, SHIFTS

__all__ = ["initial_rows", "mixed"]

_GOLDEN, _FIRST, _SECOND = GOLDEN - 2**64, FIRST_FACTOR - 2**64, SECOND_FACTOR - 2**64
_PART = 1 << PART_BITS
_MEAN = PARTS * (_PART - 1) // 2
_DEVIATION = (PARTS * (_PART**2 - 1) / 12) ** 0.5


def initial_rows(ids: Tensor, dim: int, *, seed: int, std: float, dtype: torch.dtype) -> Tensor:
    """Return the first values of rows, [n, dim].

    Args:
        ids: [n], int64, of any value.
        dim: The length of a row.
        seed: The seed of the table, 64 bits.
        std: The standard deviation of the values.
        dtype: Their type: float32 or float64.

    >>> initial_rows(torch.tensor([-3, 8]), 2, seed=1, std=1.0, dtype=torch.float32)[1:].tolist() == (
    ...     initial_rows(torch.tensor([8]), 2, seed=1, std=1.0, dtype=torch.float32).tolist()
    ... )
    True
    """
    if is_searchable(ids):
        return initial_by_compiled(ids, dim, seed=seed, mean=_MEAN, factor=std / _DEVIATION, dtype=dtype)
    columns = torch.arange(1, dim + 1, device=ids.device).mul_(_GOLDEN)
    bits = mixed(mixed(ids ^ seed).unsqueeze(1) + columns)
    total = bits & (_PART - 1)
    for part in range(1, PARTS):
        total += (bits >> (PART_BITS * part)).bitwise_and_(_PART - 1)
    return total.sub_(_MEAN).to(dtype).mul_(std / _DEVIATION)


def mixed(bits: Tensor) -> Tensor:
    """Return a hash of each integer of 64 bits, one to one."""
    first, second, third = SHIFTS
    bits = (bits ^ _shifted(bits, first)).mul_(_FIRST)
    bits ^= _shifted(bits, second)
    bits.mul_(_SECOND)
    bits ^= _shifted(bits, third)
    return bits


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return bits shifted right, with zeros from the left; torch repeats the sign."""
    return (bits >> by).bitwise_and_((1 << (64 - by)) - 1)
