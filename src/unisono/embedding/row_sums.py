"""Sums of gradients by row: the kernel of backward and of the sum over leaves.

Ids are sorted once, which brings the entries of each row together, and embedding_bag adds up each run of them: it reads
the rows of its weight in any order, scales them, prefetches, and adds from left to right. So the order of additions is
that of the entries, whatever the number of threads, and no row of an entry is written out before it is added.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["add_row_gradients", "coalesce_rows", "row_gradient", "sum_by_row"]

_RADIX = 32768
"""From so many integers on, torch sorts by radix on a CPU."""
_PADDED = 8192
"""From so many on, sorting `_RADIX` integers by radix is faster than sorting these by comparison."""


def sum_by_row(
    ids: Tensor, source: Tensor, entries: Tensor | None = None, scale: Tensor | None = None, *, rows: int
) -> tuple[Tensor, Tensor]:
    """Add up, for each id, the rows of `source` that its entries name.

    Args:
        ids: The row of the table that each entry belongs to, [n], int32 or int64, all in range.
        source: [m, dim], contiguous, with the values to add.
        entries: The row of `source` that each entry takes, [n]; None: the entry of the same number.
        scale: A factor for each entry, [n].
        rows: The rows of the table.

    Returns:
        The distinct ids, [u], int64, ascending, and their sums, [u, dim].

    >>> sum_by_row(torch.tensor([7, 2, 7]), torch.tensor([[1.0], [2.0], [4.0]]), rows=10)
    (tensor([2, 7]), tensor([[2.],
            [5.]]))
    """
    ordered, order = _sorted(ids, rows)
    distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
    begins = counts.cumsum(0).sub_(counts)
    taken = order if entries is None else entries.index_select(0, order)
    sums = F.embedding_bag(
        taken, source, begins, mode="sum", per_sample_weights=None if scale is None else scale.index_select(0, order)
    )
    return distinct.long(), sums


def _sorted(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return ids in ascending order, and for each of them its place in `ids`; equal ones keep their order."""
    if ids.device.type == "cpu" and rows < 2**31 - 1:
        ids = ids.int()
        if _PADDED <= (n := len(ids)) < _RADIX:
            padded = ids.new_full((_RADIX,), rows)
            padded[:n] = ids
            ordered, order = torch.sort(padded, stable=True)
            return ordered[:n], order[:n]
    ordered, order = torch.sort(ids, stable=True)
    return ordered, order


def row_gradient(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Make the gradient of a table from distinct rows in ascending order and their values: a coalesced COO tensor."""
    return torch.sparse_coo_tensor(rows.view(1, -1), values, shape, is_coalesced=True, check_invariants=False)


def coalesce_rows(gradient: Tensor) -> Tensor:
    """Return a gradient with the values of repeated rows added up, in the order of its entries.

    If none is repeated and rows ascend, the result has the memory of the argument.
    """
    if gradient.is_coalesced():
        return gradient
    values, indices = gradient._values(), gradient._indices()[0]
    if bool((indices[1:] > indices[:-1]).all()):  # autograd does not keep the mark of what is coalesced
        return row_gradient(indices, values, gradient.shape)
    if not _is_summable(values):
        return gradient.coalesce()
    rows, sums = sum_by_row(indices, values.contiguous(), rows=len(gradient))
    return row_gradient(rows, sums, gradient.shape)


def add_row_gradients(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum of two coalesced gradients of a table, coalesced."""
    # Not left + right: whether that turns -0.0 into 0.0 depends on the memory layout of the two.
    indices = torch.cat([left._indices(), right._indices()], dim=1)
    values = torch.cat([left._values(), right._values()])
    both = torch.sparse_coo_tensor(indices, values, left.shape, check_invariants=False)
    return coalesce_rows(both)


def _is_summable(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dim() == 2 and values.dtype in (torch.float32, torch.float64)
