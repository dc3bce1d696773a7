"""The update of rows by a rule: by a compiled function if there is one, and otherwise by operations of torch.

The two differ by rounding. So which one it is must be the same on all ranks and servers of a job, and is compared at
its start (`compiled_rows.row_kernel_name`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from unisono.embedding.compiled_rows import (
    change_columns_by_compiled,
    is_compilable,
    number_rows_by_compiled,
    update_by_compiled,
)
from unisono.embedding.row_memory import RowStore
from unisono.embedding.row_optimizers import RowOptimizer, change_by_torch, clip_factors, rows_per_chunk

__all__ = ["change_columns", "change_rows", "number_rows", "update_rows"]


def change_rows(  # noqa: PLR0917  as `RowOptimizer.change`
    rule: type[RowOptimizer],
    rows: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: float,
) -> None:
    """Change copies of rows and of their state in place by a rule, after clipping and weight decay.

    See `RowOptimizer.change`. Rows and state are contiguous.
    """
    if is_compilable(rows):
        update_by_compiled(rule, rows, torch.arange(len(rows)), gradient, state, group, step)
    else:
        change_by_torch(rule, rows, gradient, state, group, step)


def number_rows(  # noqa: PLR0917  as `change_rows`
    rule: type[RowOptimizer],
    rows: Tensor,
    gradient: Tensor,
    factors: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
) -> None:
    """Compute what an update makes of whole rows, without changing them: the first part of `change_rows`.

    Args:
        rule: The rule.
        rows: Copies of the table's rows, [n, dim]; read with weight decay only.
        gradient: Their gradients, [n, dim].
        factors: Gets the factors of rows for `clip_row_norm`, [n]; left alone without that.
        state: Copies of the state with a number for each row, [n], which are changed.
        group: The settings.
    """
    if is_compilable(gradient):
        number_rows_by_compiled(rule, rows, gradient, factors, state, group)
        return
    if group["clip_row_norm"] is not None:
        factors.copy_(clip_factors(gradient, group["clip_row_norm"]).squeeze(1))
        gradient = gradient * factors.unsqueeze(1)
    if group["weight_decay"] != 0 and state:
        gradient = gradient.add(rows, alpha=group["weight_decay"])
    rule.change_per_row(gradient, state, group)


def change_columns(  # noqa: PLR0917  as `change_rows`
    rule: type[RowOptimizer],
    rows: Tensor,
    gradient: Tensor,
    factors: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: float,
) -> None:
    """Change columns of rows: the second part of `change_rows`, of which it has the bits.

    Args:
        rule: The rule.
        rows: Copies of columns of the table's rows, [n, columns].
        gradient: These columns of their gradients, [n, columns].
        factors: What `number_rows` has made, [n].
        state: What it has made, [n], and copies of the columns of the other state, [n, columns], which are changed.
        group: The settings.
        step: The number of this update of the table, from 1.
    """
    if is_compilable(rows):
        change_columns_by_compiled(rule, rows, gradient, factors, state, group, step)
        return
    if group["clip_row_norm"] is not None:
        gradient = gradient * factors.unsqueeze(1)
    if group["weight_decay"] != 0:
        gradient = gradient.add(rows, alpha=group["weight_decay"])
    rule.change(rows, gradient, state, group, step)


def update_rows(  # noqa: PLR0917  as `change_rows`
    rule: type[RowOptimizer],
    weight: Tensor,
    which: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    group: Mapping[str, Any],
    step: float,
) -> None:
    """Change rows of a table and their state by a rule. This has the bits of `change_rows` with copies.

    Args:
        rule: The rule.
        weight: The table, [rows, dim].
        which: The rows to update, [n], int64, all different.
        gradient: Their gradients, [n, dim].
        state: The table's state, [rows] or [rows, dim].
        group: The settings.
        step: The number of this update of the table, from 1.
    """
    state = {key: state[key] for key in (*rule.per_row, *rule.per_element)}
    if is_compilable(weight) and all(map(_has_rows, (weight, *state.values()))):
        update_by_compiled(rule, weight, which, gradient, state, group, step)
        torch.autograd.graph.increment_version([weight, *state.values()])
        return
    weights, stores = RowStore.of(weight), {key: RowStore.of(tensor) for key, tensor in state.items()}
    chunk = max(len(which), 1)
    if weight.device.type == "cpu":
        chunk = rows_per_chunk(rule, weight.shape[1] * weight.element_size())
    for start in range(0, len(which), chunk):
        some, of_rows = which[start : start + chunk], gradient[start : start + chunk]
        rows = weights.read(some)
        taken = {key: store.read(some) for key, store in stores.items()}
        change_rows(rule, rows, of_rows, taken, group, step)
        for key, store in stores.items():
            store.write(some, taken[key])
        weights.write(some, rows)


def _has_rows(store: Tensor) -> bool:
    """Return True if the numbers of each row are side by side."""
    return store.dim() == 1 or store.shape[1] == 1 or store.stride(1) == 1
