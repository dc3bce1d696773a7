"""Rows by compiled functions: what tables do on a CPU if there is a compiler. Otherwise torch does it.

A function is compiled when it is first needed, in 20 to 50 ms, and for one length of rows. It reads a row, computes and
writes it back, and meanwhile asks for the rows of later entries. A row's new value depends on this row, its gradient
and its state alone. Sums and lookups have the bits of torch's operations; updates differ from these by rounding.

The package llvmlite is used alone, and not numba, which is built on it: numba took 0.4 s of CPU time to import and 1.7
to 4.5 s to compile one rule, or files of a cache, where these texts take 0.1 s and 0.02; and plain loops of numba took
1.4 to 7 times as long as explicit vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unisono.embedding.compiler import CompiledFunction, has_compiler
from unisono.embedding.row_formulas import Part, settings_of, stores_of, update_code
from unisono.embedding.row_optimizers import RowOptimizer
from unisono.embedding.row_sum_code import MOST_POOLED, bags_code, sort_code, sum_code

__all__ = [
    "SORTED_AT_ONCE",
    "change_columns_by_compiled",
    "is_compilable",
    "is_poolable",
    "is_summable",
    "number_rows_by_compiled",
    "pool_by_compiled",
    "row_kernel_name",
    "sort_by_compiled",
    "sum_by_compiled",
    "update_by_compiled",
]

_DTYPES = (torch.float32, torch.float64)
_WITH_MEMORY = (Tensor, torch.nn.Parameter)
"""The types of tensors that have an address: those of `unisono plan` have none."""
SORTED_AT_ONCE = 11
"""The bits of integers by which one pass of `sort_by_compiled` sorts: what it counts should fit the cache."""


def row_kernel_name() -> str:
    """Return what updates the rows of tables in this process, in words: bits depend on it."""
    if has_compiler():
        return "functions compiled by llvmlite"
    return "operations of torch, as llvmlite is missing: install unisono[tables] everywhere, or nowhere"


def is_compilable(weight: Tensor) -> bool:
    """Return True if there is a compiled function for a table, or for rows."""
    return (
        weight.dtype in _DTYPES
        and weight.device.type == "cpu"
        and type(weight) in _WITH_MEMORY
        and weight.shape[1] > 0
        and has_compiler()
    )


def is_summable(source: Tensor) -> bool:
    """Return True if there is a compiled function for sums of rows. `torch.compile` traces operations of torch."""
    return is_compilable(source) and not torch.compiler.is_compiling()


def update_by_compiled(  # noqa: PLR0917  as `row_optimizers.change_rows`
    rule: type[RowOptimizer],
    weight: Tensor,
    which: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: float,
) -> None:
    """Update rows of a table and its state in place.

    Args:
        rule: The rule.
        weight: The table, [rows, dim], for which `is_compilable` is true; the numbers of a row side by side.
        which: The rows to update, [n], int64, all different.
        gradient: Their gradients, [n, dim].
        state: The table's state, [rows] or [rows, dim], with the numbers of a row side by side.
        group: The settings.
        step: The number of this update of the table, from 1.

    Raises:
        IndexError: The table has no such row. Those before it in `which` have been updated.
    """
    assert all(len(state[key]) == len(weight) for key in (*rule.per_row, *rule.per_element)), [*state]
    _call_update(rule, "all", {"weight": weight, **state}, which, gradient, group, step, dim=weight.shape[1])


def number_rows_by_compiled(  # noqa: PLR0917  as `row_optimizers.change_rows`
    rule: type[RowOptimizer],
    rows: Tensor,
    gradient: Tensor,
    factors: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
) -> None:
    """Compute what an update makes of whole rows; see `row_updates.number_rows`."""
    stores, which = {"weight": rows, "factors": factors, **state}, torch.arange(len(gradient))
    _call_update(rule, "row numbers", stores, which, gradient, group, 1.0, dim=gradient.shape[1])


def change_columns_by_compiled(  # noqa: PLR0917  as `row_optimizers.change_rows`
    rule: type[RowOptimizer],
    rows: Tensor,
    gradient: Tensor,
    factors: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: float,
) -> None:
    """Change columns of rows; see `row_updates.change_columns`."""
    stores, which = {"weight": rows, "factors": factors, **state}, torch.arange(len(rows))
    _call_update(rule, "columns", stores, which, gradient, group, step, dim=rows.shape[1])


def _call_update(  # noqa: PLR0917  as `update_by_compiled`
    rule: type[RowOptimizer],
    part: Part,
    stores: Mapping[str, Tensor],
    which: Tensor,
    gradient: Tensor,
    group: Mapping[str, Any],
    step: float,
    *,
    dim: int,
) -> None:
    n = len(which)
    if not n:
        return
    if dim > 1 and gradient.stride(1) != 1:
        gradient = gradient.contiguous()
    numbers = settings_of(rule, dim, group, float(step))
    settings = torch.tensor([float(number) for number in numbers.values()], dtype=gradient.dtype)
    which = which.contiguous()
    clips, decays = group["clip_row_norm"] is not None, group["weight_decay"] != 0
    used = [stores[name] for name in stores_of(rule, part, decays=decays)]
    assert all(store.dtype == gradient.dtype for store in used), [store.dtype for store in used]
    rows = len(used[0])
    done = _update_function(rule, part, gradient.dtype.itemsize, dim, clips, decays).call(
        n,
        rows,
        which.data_ptr(),
        gradient.data_ptr(),
        gradient.stride(0),
        settings.data_ptr(),
        *(number for store in used for number in (store.data_ptr(), store.stride(0))),
    )
    if done != n:
        raise IndexError(f"row {int(which[done])} is to be updated, and the table has {rows} rows")


def sort_by_compiled(keys: Tensor, *, shift: int, bits: int) -> Tensor:
    """Return integers sorted by some of their bits, keeping the order of equal ones. The argument may be written.

    Args:
        keys: [n], int64, contiguous. There is a compiler.
        shift: The number of the lowest of the bits.
        bits: The number of bits. Each 11 are a pass.
    """
    n, function = len(keys), _sort_function()
    passes = -(-bits // SORTED_AT_ONCE)
    digit = -(-bits // max(passes, 1))
    counts, other = torch.empty((1 << digit) + 1, dtype=torch.int64), torch.empty_like(keys)
    for begin in range(shift, shift + bits, max(digit, 1)):
        function.call(n, keys.data_ptr(), other.data_ptr(), counts.data_ptr(), begin, (1 << digit) - 1)
        keys, other = other, keys
    return keys


def sum_by_compiled(ordered: Tensor, order: Tensor, source: Tensor, *, width: int) -> tuple[Tensor, Tensor]:
    """Add up the rows of equal ids, in the order of their places, with the bits of torch's embedding_bag.

    Args:
        ordered: Ids in ascending order, [n], int64, at least one.
        order: Their places before, [n], int64.
        source: Rows, [m, dim], contiguous, for which `is_summable` is true.
        width: How many places in turn take the same row of `source`.

    Returns:
        The distinct ids, ascending, and their sums.
    """
    count = 1 + int((ordered[1:] != ordered[:-1]).sum())
    found, ids = torch.zeros(1, dtype=torch.int64), ordered.new_empty(count)
    sums = source.new_empty(count, source.shape[1])
    _sum_function(source.dtype.itemsize, source.shape[1]).call(
        len(ordered),
        ordered.data_ptr(),
        order.data_ptr(),
        width,
        source.data_ptr(),
        found.data_ptr(),
        ids.data_ptr(),
        sums.data_ptr(),
    )
    return ids, sums


def is_poolable(weight: Tensor) -> bool:
    """Return True if there is a compiled function for sums of bags of a table."""
    return is_summable(weight) and weight.shape[1] <= MOST_POOLED and weight.stride(1) == 1


def pool_by_compiled(weight: Tensor, ids: Tensor, begins: Tensor) -> Tensor:
    """Return the sum of each bag's rows, with the bits of torch's embedding_bag.

    Args:
        weight: The rows, [rows, dim], for which `is_poolable` is true.
        ids: The rows of all bags, [n], int32 or int64.
        begins: The number of the first id of each bag, [bags], of the type of `ids`.

    Raises:
        IndexError: There is no such row.
    """
    n, bags, dim = len(ids), len(begins), weight.shape[1]
    sums = weight.new_empty(bags, dim)
    if not bags:
        return sums
    ids, begins = ids.contiguous(), begins.contiguous()
    function = _bags_function(weight.dtype.itemsize, dim, ids.dtype.itemsize)
    done = function.call(
        n,
        bags,
        len(weight),
        ids.data_ptr(),
        begins.data_ptr(),
        weight.data_ptr(),
        weight.stride(0),
        sums.data_ptr(),
    )
    if done != n:
        raise IndexError(f"row {int(ids[done])} is looked up, and there are {len(weight)}")
    return sums


@cache
def _sort_function() -> CompiledFunction:
    return CompiledFunction("sort", sort_code(), arguments=6)


@cache
def _sum_function(itemsize: int, dim: int) -> CompiledFunction:
    return CompiledFunction("sum", sum_code(itemsize=itemsize, dim=dim), arguments=8)


@cache
def _bags_function(itemsize: int, dim: int, id_nbytes: int) -> CompiledFunction:
    return CompiledFunction("bags", bags_code(itemsize=itemsize, dim=dim, id_nbytes=id_nbytes), arguments=8)


@cache
def _update_function(  # noqa: PLR0917  what is cached is asked for by position
    rule: type[RowOptimizer], part: Part, itemsize: int, dim: int, clips: bool, decays: bool
) -> CompiledFunction:
    text = update_code(rule, part, itemsize=itemsize, dim=dim, clips=clips, decays=decays)
    return CompiledFunction("update", text, arguments=6 + 2 * len(stores_of(rule, part, decays=decays)))
