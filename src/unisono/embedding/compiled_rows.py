"""Updates of rows by compiled functions, on a CPU and if there is a compiler. Otherwise torch does it.

A function is compiled when it is first needed, in 20 to 50 ms, and for one length of rows. It reads a row, computes and
writes it back, and meanwhile asks for the rows of later entries. A row's new value depends on this row, its gradient
and its state alone. Updates differ from those of torch's operations by rounding.

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

__all__ = [
    "WITH_MEMORY",
    "change_columns_by_compiled",
    "is_compilable",
    "number_rows_by_compiled",
    "row_kernel_name",
    "update_by_compiled",
]

_DTYPES = (torch.float32, torch.float64)
WITH_MEMORY = (Tensor, torch.nn.Parameter)
"""The types of tensors that have an address: those of `unisono plan` have none."""


def row_kernel_name() -> str:
    """Return what updates the rows of tables in this process, in words: bits depend on it."""
    if has_compiler():
        return "functions compiled by llvmlite"
    return "operations of torch, as llvmlite is missing: install unisono[tables] everywhere, or nowhere"


def is_compilable(weight: Tensor) -> bool:
    """Return True if there is a compiled function for a table, or for rows."""
    return (
        weight.dtype in _DTYPES
        and weight.is_cpu
        and type(weight) in WITH_MEMORY
        and weight.shape[1] > 0
        and has_compiler()
    )


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


@cache
def _update_function(  # noqa: PLR0917  what is cached is asked for by position
    rule: type[RowOptimizer], part: Part, itemsize: int, dim: int, clips: bool, decays: bool
) -> CompiledFunction:
    text = update_code(rule, part, itemsize=itemsize, dim=dim, clips=clips, decays=decays)
    return CompiledFunction("update", text, arguments=6 + 2 * len(stores_of(rule, part, decays=decays)))
