"""Sums of rows by compiled functions, on a CPU and if there is a compiler: ids in order, gradients by row, bags.

Each has the bits of torch's operations. A step of a small model calls them with few ids, so each does at once what
takes ten calls of torch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from unisono.embedding.compiled_rows import is_compilable
from unisono.embedding.compiler import CompiledFunction
from unisono.embedding.id_sort_code import ascending_code, order_code
from unisono.embedding.row_sum_code import MOST_POOLED, bags_code, gather_code, merge_code, sum_code

__all__ = [
    "ascend_by_compiled",
    "copy_by_compiled",
    "is_poolable",
    "is_summable",
    "merge_by_compiled",
    "order_by_compiled",
    "pool_by_compiled",
    "sum_by_compiled",
]

_SORTED_AT_ONCE = 11
"""The bits of integers by which one pass of `order_by_compiled` sorts: what it counts should fit the cache."""


def is_summable(source: Tensor) -> bool:
    """Return True if there are compiled functions for sums of rows. `torch.compile` traces operations of torch."""
    return not torch.compiler.is_compiling() and is_compilable(source)


def ascend_by_compiled(ids: Tensor) -> bool:
    """Return True if ids ascend and none is repeated: [n], int64, contiguous, on a CPU. There must be a compiler."""
    n = ids.shape[0]
    return n < 2 or bool(_ascending_function().call(n, ids.data_ptr()) == n)


def copy_by_compiled(table: Tensor, which: Tensor, address: int) -> None:
    """Copy rows, as `torch.index_select` does, in a third of its time where they are not in the cache.

    Args:
        table: [rows, dim], for which `is_compilable` is true; the numbers of a row side by side.
        which: The rows, [n], int64, contiguous.
        address: Where there is memory for the copies, [n, dim].

    Raises:
        IndexError: There is no such row.
    """
    n, (rows, dim) = which.shape[0], table.shape
    if not n:
        return
    function = _gather_function(table.itemsize, dim)
    done = function.call(n, which.data_ptr(), rows, table.data_ptr(), table.stride(0), address)
    if done != n:
        raise IndexError(f"row {int(which[done])} is to be copied, and there are {rows}")


def order_by_compiled(ids: Tensor, *, least: int, bits: int, width: int = 1) -> tuple[Tensor, Tensor, int]:
    """Put ids in ascending order. There must be a compiler.

    Args:
        ids: [n], int32 or int64, on a CPU, at least one. Their number is a multiple of `width`.
        least: A bound for the least of them.
        bits: The bits of the greatest difference to `least`.
        width: How many ids in turn make a group.

    Returns:
        The ids in order, int64; the number of the group of each, in the order of their places where ids are equal; and
        the number of distinct ids.
    """
    n, ids = ids.shape[0], ids.contiguous()
    passes = -(-bits // _SORTED_AT_ONCE)
    digit = -(-bits // max(passes, 1))
    group_bits = (n // width).bit_length()
    is_packed = bits + group_bits <= 64
    length = n if is_packed else 2 * n
    memory = ids.new_empty(2 * length + (1 << digit) + 1, dtype=torch.int64)
    a, b, counts = torch.split(memory, [length, length, (1 << digit) + 1])
    count = _order_function(passes, ids.itemsize, is_packed).call(
        n,
        ids.data_ptr(),
        width,
        least,
        group_bits,
        a.data_ptr(),
        b.data_ptr(),
        counts.data_ptr(),
        digit,
    )
    a, b = a[:n], b[:n]
    return (a, b, count) if passes % 2 else (b, a, count)


def sum_by_compiled(ordered: Tensor, order: Tensor, source: Tensor, *, distinct: int) -> tuple[Tensor, Tensor]:
    """Add up the rows of equal ids, in their order, with the bits of torch's embedding_bag.

    Args:
        ordered: Ids in ascending order, [n], int64, at least one.
        order: The row of `source` that each takes, [n], int64.
        source: Rows, [m, dim], contiguous, for which `is_summable` is true.
        distinct: The number of distinct ids.

    Returns:
        The distinct ids, ascending, and their sums.
    """
    dim = source.shape[1]
    ids, found = ordered.new_empty(distinct), ordered.new_zeros(1)
    sums = source.new_empty((distinct, dim))
    _sum_function(source.itemsize, dim).call(
        ordered.shape[0],
        ordered.data_ptr(),
        order.data_ptr(),
        source.data_ptr(),
        found.data_ptr(),
        ids.data_ptr(),
        sums.data_ptr(),
    )
    return ids, sums


def merge_by_compiled(rows: Tensor, values: Tensor, others: Tensor, their_values: Tensor) -> tuple[Tensor, Tensor]:
    """Add up two lists of rows, with the bits of `sum_by_compiled` of one after the other.

    Args:
        rows: Distinct ids in ascending order, [n], int64.
        values: Their rows, [n, dim], contiguous, for which `is_summable` is true.
        others: Distinct ids in ascending order, [m], int64.
        their_values: Their rows, [m, dim], contiguous.

    Returns:
        The distinct ids, ascending, and their sums: views of memory for n + m.
    """
    n, m, dim = rows.shape[0], others.shape[0], values.shape[1]
    rows, others = rows.contiguous(), others.contiguous()
    ids, at = rows.new_empty(n + m), rows.new_zeros(2)
    sums = values.new_empty((n + m, dim))
    count = _merge_function(values.itemsize, dim).call(
        n,
        m,
        rows.data_ptr(),
        values.data_ptr(),
        others.data_ptr(),
        their_values.data_ptr(),
        ids.data_ptr(),
        sums.data_ptr(),
        at.data_ptr(),
    )
    return ids[:count], sums[:count]


def is_poolable(weight: Tensor) -> bool:
    """Return True if there is a compiled function for sums of bags of a table."""
    return is_summable(weight) and weight.shape[1] <= MOST_POOLED and weight.stride(1) == 1


def pool_by_compiled(weight: Tensor, ids: Tensor, begins: Tensor | None, width: int) -> Tensor:
    """Return the sum of each bag's rows, with the bits of torch's embedding_bag.

    Args:
        weight: The rows, [rows, dim], for which `is_poolable` is true.
        ids: The rows of all bags, [n], int32 or int64.
        begins: The number of the first id of each bag, [bags], of the type of `ids`; None: bags have `width` ids each.
        width: The number of ids in each bag, at least 1.

    Raises:
        IndexError: There is no such row.
    """
    n, dim = ids.shape[0], weight.shape[1]
    bags = n // width if begins is None else begins.shape[0]
    sums = weight.new_empty((bags, dim))
    if not bags:
        return sums
    ids, begins = ids.contiguous(), None if begins is None else begins.contiguous()
    function = _bags_function(weight.itemsize, dim, ids.itemsize, is_even=begins is None)
    done = function.call(
        n,
        bags,
        weight.shape[0],
        ids.data_ptr(),
        width if begins is None else begins.data_ptr(),
        weight.data_ptr(),
        weight.stride(0),
        sums.data_ptr(),
    )
    if done != n:
        raise IndexError(f"row {int(ids[done])} is looked up, and there are {len(weight)}")
    return sums


@cache
def _ascending_function() -> CompiledFunction:
    return CompiledFunction("ascending", ascending_code(), arguments=2)


@cache
def _gather_function(itemsize: int, dim: int) -> CompiledFunction:
    return CompiledFunction("gather", gather_code(itemsize=itemsize, dim=dim), arguments=6)


@cache
def _order_function(passes: int, id_nbytes: int, is_packed: bool) -> CompiledFunction:
    text = order_code(passes=passes, id_nbytes=id_nbytes, is_packed=is_packed)
    return CompiledFunction("order", text, arguments=9)


@cache
def _sum_function(itemsize: int, dim: int) -> CompiledFunction:
    return CompiledFunction("sum", sum_code(itemsize=itemsize, dim=dim), arguments=7)


@cache
def _merge_function(itemsize: int, dim: int) -> CompiledFunction:
    return CompiledFunction("merge", merge_code(itemsize=itemsize, dim=dim), arguments=9)


@cache
def _bags_function(itemsize: int, dim: int, id_nbytes: int, *, is_even: bool) -> CompiledFunction:
    text = bags_code(itemsize=itemsize, dim=dim, id_nbytes=id_nbytes, is_even=is_even)
    return CompiledFunction("bags", text, arguments=8)
