"""Collating all micro-batches of a step together, with the results that torch's default_collate has for each.

Virtual ranks make micro-batches small, and each tensor that is stacked alone costs more than the samples in it. So the
values at one place of all samples of a step, a column, become one tensor, which is then cut without copying. That is
done only where it cannot be told from collating each micro-batch: all values of a column have the same type, and
tensors the same dtype and the usual strides. Each part begins at an aligned address, as a tensor of its own would; rows
between two parts that see to that are repeated samples, and are left out. Parts are no views in autograd's sense.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

__all__ = ["COLUMN_ALIGNMENT", "Columns", "collate_columns", "collates_as_torch", "empty_shared"]

COLUMN_ALIGNMENT = 64
"""Bytes to which each tensor is aligned, as a tensor of its own would be: bits of products may depend on it."""

_MOST_PADDING = 4096
"""Bytes that may be left out between two micro-batches, even if they are more than those of the micro-batches."""
_KEPT = {str, bytes}
_NUMBERS = {bool: ("b", torch.bool), int: ("q", torch.int64), float: ("d", torch.float64)}
"""Of Python's numbers: the type code of an array, and the dtype that default_collate makes of them."""
_ORDERED = (3, 4)
"""Dimensions of a sample whose strides decide those of the stacked tensor: it may become channels_last."""


class Columns(NamedTuple):
    """The collated micro-batches of a step."""

    tree: Any
    """As default_collate returns it, with tensors of the rows of all micro-batches, and `Values`."""
    sizes: tuple[int, ...]
    """The number of samples of each micro-batch."""

    def parts(self) -> list[Any]:
        """Return the micro-batches."""
        return _cut(self.tree, tuple(self.sizes))  # torch's copying into page-locked memory makes it a list


class Values(NamedTuple):
    """A column that stays a list or tuple: that of strings."""

    values: Sequence[Any]


class _NotAlikeError(Exception):
    """The values of a column cannot be collated together."""


def collates_as_torch() -> bool:
    """Return True if default_collate does what torch has it do, and no program has registered functions of its own."""
    return _are_torchs(*default_collate_fn_map.values())


@lru_cache(maxsize=1)
def _are_torchs(*functions: Any) -> bool:
    return all(function.__module__ == torch_collate.__name__ for function in functions)


def collate_columns(samples: list[Any], sizes: Sequence[int], *, share: bool = False) -> Columns | None:
    """Collate the samples of all micro-batches of a step. Return None if they are not alike.

    Args:
        samples: The samples of all micro-batches, in order.
        sizes: The number of samples of each; none is 0.
        share: Put tensors into shared memory, one piece for each.

    >>> collate_columns([(1, "a"), (2, "b"), (3, "c")], [2, 1]).parts()
    [[tensor([1, 2]), ('a', 'b')], [tensor([3]), ('c',)]]
    """
    own = tuple(sizes)
    try:
        return Columns(_collate(samples, own, share), own)
    # Whatever stack and tensor refuse, such as shapes that differ, default_collate refuses or knows how to do.
    except (_NotAlikeError, RuntimeError, ValueError, TypeError, KeyError, OverflowError):
        return None


def _collate(values: Sequence[Any], sizes: tuple[int, ...], share: bool) -> Any:
    kind: Any = type(values[0])
    if [*map(type, values)].count(kind) != len(values):
        raise _NotAlikeError
    if kind is Tensor:
        return _stack(values, sizes, share=share)
    if kind is tuple or kind is list:
        return [_collate(column, sizes, share) for column in zip(*values, strict=True)]
    if kind is dict:
        keys = [*values[0]]
        if any([*values[start]] != keys for start in accumulate(sizes[:-1])):  # default_collate goes by these
            raise _NotAlikeError
        return {key: _collate([each[key] for each in values], sizes, share) for key in keys}
    if kind in _NUMBERS:
        return _aligned(_through_array(*_NUMBERS[kind], values), sizes)
    return Values(values) if kind in _KEPT else _collate_numpy(kind, values, sizes, share)


def _collate_numpy(kind: Any, values: Sequence[Any], sizes: tuple[int, ...], share: bool) -> Tensor:
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray:
        return _stack([torch.as_tensor(each) for each in values], sizes, share=share)
    if numpy is not None and issubclass(kind, (numpy.number, numpy.bool_)):
        return _aligned(torch.as_tensor(values), sizes)
    raise _NotAlikeError


def _stack(values: Sequence[Tensor], sizes: tuple[int, ...], *, share: bool) -> Tensor:
    first = values[0]
    dtype, shape = first.dtype, first.shape
    is_plain = first.layout is torch.strided and first.is_cpu
    if not is_plain or first.is_nested or first.is_quantized:
        raise _NotAlikeError
    if len(shape) in _ORDERED:
        usual = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        if [*map(Tensor.stride, values)].count(usual) != len(values):
            raise _NotAlikeError
    # Into memory of a dtype, stack would convert what it promotes otherwise.
    shares_it = share and _paddings(sizes, first.nbytes) is None and all(each.dtype == dtype for each in values)
    if not shape and dtype is torch.int64:
        # Labels, in less time than by stack. The array refuses floats, and the lists of tensors with a dimension.
        stacked = _through_array("q", dtype, [*map(Tensor.tolist, values)])
    elif shares_it:
        stacked = torch.stack(values, out=empty_shared((len(values), *shape), dtype))  # type: ignore[arg-type]
    else:
        stacked = torch.stack(values)  # type: ignore[arg-type]
    # With these dtypes, no micro-batch alone would have another one: what stack promotes them to lies between the two.
    starts = [values[start].dtype for start in accumulate(sizes[:-1])]
    if stacked.dtype != dtype or starts.count(dtype) != len(starts):
        raise _NotAlikeError
    if stacked.requires_grad:  # one graph would be the graph of all micro-batches
        raise _NotAlikeError
    return stacked if shares_it else _aligned(stacked, sizes)


def _through_array(code: str, dtype: torch.dtype, values: Sequence[Any]) -> Tensor:
    """Return a tensor of numbers, in half the time of torch.tensor."""
    return torch.frombuffer(array(code, values), dtype=dtype).clone()  # clone, for memory that is aligned and torch's


def empty_shared(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without values in shared memory."""
    storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(storage).resize_(shape)  # resize_ makes no view, as view would


def _aligned(rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return the rows, with some repeated so that each micro-batch begins at an aligned address."""
    order = _padded_order(sizes, rows.nbytes // rows.shape[0])
    return rows if order is None else rows.index_select(0, order)


def _cut(tree: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Return a list of what each micro-batch has of a tree."""
    if isinstance(tree, Tensor):
        return _cut_tensor(tree, sizes)
    if isinstance(tree, Values):
        ends = accumulate(sizes)
        return [tree.values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    if not tree:
        return [type(tree)() for _ in sizes]
    if isinstance(tree, dict):
        columns = zip(*(_cut(column, sizes) for column in tree.values()), strict=True)
        return [dict(zip(tree, each, strict=True)) for each in columns]
    return [[*each] for each in zip(*(_cut(column, sizes) for column in tree), strict=True)]


def _cut_tensor(tensor: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    if len(sizes) == 1:
        return [tensor]
    paddings = _paddings(sizes, tensor.nbytes // tensor.shape[0])
    if paddings is None:
        return [*tensor.unsafe_split_with_sizes(sizes)]
    cuts = [size for pair in zip(sizes, paddings, strict=True) for size in pair]
    return [*tensor.unsafe_split_with_sizes(cuts)[::2]]


@lru_cache(maxsize=256)
def _paddings(sizes: tuple[int, ...], row_nbytes: int) -> tuple[int, ...] | None:
    """Return the number of rows that follow each micro-batch up to an aligned address; None if none is needed.

    >>> _paddings((3, 3, 2), 8)
    (5, 5, 0)

    Raises:
        _NotAlikeError: The rows would be too many.
    """
    unit = COLUMN_ALIGNMENT // math.gcd(COLUMN_ALIGNMENT, row_nbytes)
    paddings = *(-size % unit for size in sizes[:-1]), 0
    if not any(paddings):
        return None
    if sum(paddings) > sum(sizes) and max(paddings) * row_nbytes > _MOST_PADDING:
        raise _NotAlikeError
    return paddings


@lru_cache(maxsize=256)
def _padded_order(sizes: tuple[int, ...], row_nbytes: int) -> Tensor | None:
    """Return the numbers of the rows of all micro-batches, each followed by its padding; None if none is needed."""
    paddings = _paddings(sizes, row_nbytes)
    if paddings is None:
        return None
    order: list[int] = []
    for end, size, padding in zip(accumulate(sizes), sizes, paddings, strict=True):
        order += [*range(end - size, end), *[end - 1] * padding]
    return torch.tensor(order, device="cpu")
