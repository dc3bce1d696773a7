"""Searches of ids and first values of rows by compiled functions, on a CPU and if there is a compiler."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from unisono.embedding.compiled_rows import WITH_MEMORY
from unisono.embedding.compiler import CompiledFunction, has_compiler
from unisono.embedding.id_search_code import find_code, initial_code, insert_code

__all__ = ["find_by_compiled", "initial_by_compiled", "insert_by_compiled", "is_searchable"]


def is_searchable(ids: Tensor) -> bool:
    """Return True if there are compiled functions for ids: [n], int64. `torch.compile` traces operations of torch."""
    return (
        ids.dtype == torch.int64
        and ids.dim() == 1
        and ids.is_cpu
        and type(ids) in WITH_MEMORY
        and not torch.compiler.is_compiling()
        and has_compiler()
    )


def find_by_compiled(ids: Tensor, slots: Tensor, listed: Tensor) -> Tensor:
    """Return the place of each id in a list, [n], int64; -1 for those that are not there.

    Args:
        ids: [n], for which `is_searchable` is true.
        slots: The slots of an `IdIndex`, [a power of 2], int32.
        listed: The list, [capacity], int64, contiguous, at least one.
    """
    n, ids = ids.shape[0], ids.contiguous()
    found, begins = ids.new_empty(n), ids.new_empty(n)
    if n:
        _find_function().call(
            n,
            ids.data_ptr(),
            slots.data_ptr(),
            slots.shape[0] - 1,
            listed.data_ptr(),
            found.data_ptr(),
            begins.data_ptr(),
        )
    return found


def insert_by_compiled(places: Tensor, slots: Tensor, listed: Tensor) -> None:
    """Put places of a list into free slots. Their ids must not be in the index, and more slots than that be free.

    Args:
        places: [n], int64, for which `is_searchable` is true.
        slots: The slots of an `IdIndex`, [a power of 2], int32.
        listed: The list, [capacity], int64, contiguous.
    """
    n, places = places.shape[0], places.contiguous()
    if n:
        _insert_function().call(n, places.data_ptr(), slots.data_ptr(), slots.shape[0] - 1, listed.data_ptr())


def initial_by_compiled(ids: Tensor, dim: int, *, seed: int, mean: int, factor: float, dtype: torch.dtype) -> Tensor:
    """Return the first values of rows; see `initial_rows`, whose bits it has.

    Args:
        ids: [n], for which `is_searchable` is true.
        dim: The length of a row.
        seed: The seed of the table.
        mean: What sums of the parts of a hash are reduced by.
        factor: What the rest is multiplied by.
        dtype: Their type: float32 or float64.
    """
    n, ids = ids.shape[0], ids.contiguous()
    rows, number = torch.empty((n, dim), dtype=dtype), torch.tensor([factor], dtype=dtype)
    if n and dim:
        function = _initial_function(dtype.itemsize, dim)
        function.call(n, ids.data_ptr(), seed, mean, number.data_ptr(), rows.data_ptr())
    return rows


@cache
def _find_function() -> CompiledFunction:
    return CompiledFunction("find", find_code(), arguments=7)


@cache
def _insert_function() -> CompiledFunction:
    return CompiledFunction("insert", insert_code(), arguments=5)


@cache
def _initial_function(itemsize: int, dim: int) -> CompiledFunction:
    return CompiledFunction("initial", initial_code(itemsize=itemsize, dim=dim), arguments=6)
