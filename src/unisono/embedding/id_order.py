"""Ids in ascending order, and where each of them was: the most expensive part of adding gradients up by row.

Each id is sorted as the upper bits of an integer whose lower bits are its place: no two are equal, and equal ids keep
their order. A compiled function sorts these by radix: 16384 ids of 24 bits take 0.2 ms instead of the 0.8 ms of
`torch.sort`, and 40960 take 0.3 instead of 0.6 (one core of an EPYC). Ids that leave no bits are sorted with their
places beside them, 16384 in 0.3 ms; from 32768 on, torch does that faster. Without a compiler, NumPy sorts with vector
instructions, in two rounds where no bits are left, as it does not say where integers were; and without NumPy, torch
sorts. The result is the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unisono.embedding.compiled_sums import order_by_compiled
from unisono.embedding.compiler import has_compiler

try:
    import numpy
except ImportError:  # torch works without it, and so does this
    _SORTS_FAST = False
else:
    _SORTS_FAST = int(numpy.__version__.split(".")[0]) >= 2  # from 2.0 on also with AVX2 and NEON

__all__ = ["OrderedIds", "ordered_ids"]

_RADIX = 32768
"""From so many integers on, torch sorts by radix on a CPU."""
_PADDED = 8192
"""From so many on, sorting `_RADIX` integers by radix is faster than sorting these by comparison."""


class OrderedIds(NamedTuple):
    """Ids in ascending order; equal ones keep their order."""

    ids: Tensor
    """[n]."""
    places: Tensor
    """Where each was before, [n], int64; with `width`, the number of the group in which it was."""
    distinct: int | None
    """The number of distinct ids; None if it was not counted."""


def ordered_ids(ids: Tensor, *, width: int = 1, rows: int | None = None) -> OrderedIds:
    """Return ids in ascending order.

    Args:
        ids: [n], int32 or int64, of any value. It is fastest where they lie within a range of 2**62 / n.
        width: How many ids in turn make a group; n is a multiple of it.
        rows: A number above all ids, none of which is negative; None: ids may have any value.

    >>> ordered_ids(torch.tensor([7, -2, 7])).places.tolist()
    [1, 0, 2]
    """
    n = ids.shape[0]
    if ids.device.type != "cpu" or not n:
        return _grouped(*torch.sort(ids, stable=True), width)
    bits = n.bit_length()
    least, most = map(int, torch.aminmax(ids)) if rows is None else (0, rows - 1)
    span = most - least
    is_packed = bits + span.bit_length() < 64
    if (is_packed or n < _RADIX) and has_compiler():
        return OrderedIds(*order_by_compiled(ids, least=least, bits=span.bit_length(), width=width))
    if is_packed and _SORTS_FAST:
        keys = ids.long().sub(least).bitwise_left_shift_(bits).bitwise_or_(torch.arange(n))
        keys.numpy().sort()
        return _grouped(keys.bitwise_right_shift(bits).add_(least), keys.bitwise_and_((1 << bits) - 1), width)
    if _SORTS_FAST and n < _RADIX and ids.dtype == torch.int64:
        return _grouped(*_sorted_twice(ids, bits), width)
    return _grouped(*_sorted_by_torch(ids, least, span), width)


def _grouped(ordered: Tensor, order: Tensor, width: int) -> OrderedIds:
    return OrderedIds(ordered, order if width == 1 else order.div(width, rounding_mode="floor"), None)


def _sorted_twice(ids: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Sort ids of any value, and then the places of equal ones: NumPy's fast sort does not keep their order."""
    order = torch.from_numpy(ids.numpy().argsort())
    ordered = ids.index_select(0, order)
    numbers = torch.zeros_like(ordered)  # of the different ids
    torch.cumsum(ordered[1:] != ordered[:-1], 0, out=numbers[1:])
    keys = numbers.bitwise_left_shift_(bits).bitwise_or_(order)
    keys.numpy().sort()
    return ordered, keys.bitwise_and_((1 << bits) - 1)


def _sorted_by_torch(ids: Tensor, least: int, span: int) -> tuple[Tensor, Tensor]:
    if span < 2**31 - 2:
        ids = ids.long().sub(least).int()
        if _PADDED <= (n := len(ids)) < _RADIX:
            padded = ids.new_full((_RADIX,), span + 1)
            padded[:n] = ids
            ordered, order = torch.sort(padded, stable=True)
            return ordered[:n].long().add_(least), order[:n]
        ordered, order = torch.sort(ids, stable=True)
        return ordered.long().add_(least), order
    ordered, order = torch.sort(ids, stable=True)
    return ordered, order
