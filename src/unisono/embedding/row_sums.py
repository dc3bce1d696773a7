"""Sums of gradients by row: the kernel of backward and of the sum over leaves.

Ids are sorted once, which brings the entries of each row together, and embedding_bag adds up each run of them: it reads
the rows of its weight in any order, scales them, prefetches, and adds from left to right. So the order of additions is
that of the entries, whatever the number of threads, and no row of an entry is written out before it is added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unisono.coo_tensor import make_coo
from unisono.embedding.compiled_sums import (
    ascend_by_compiled,
    is_poolable,
    is_summable,
    merge_by_compiled,
    pool_by_compiled,
    sum_by_compiled,
)
from unisono.embedding.id_order import ordered_ids

__all__ = ["SummedRows", "add_row_gradients", "embed_bags", "row_gradient", "rows_of", "sum_by_row"]


class SummedRows(NamedTuple):
    """The gradient of a table: distinct rows in ascending order, and a value for each."""

    rows: Tensor
    """[u], int64. In a dynamic table, ids take the place of rows until the update."""
    values: Tensor
    """[u, dim]."""

    def between(self, start: int, stop: int) -> SummedRows:
        """Return the entries from number `start` to before number `stop`, as views."""
        return SummedRows(self.rows[start:stop], self.values[start:stop])

    def within(self, start: int | None, stop: int | None) -> SummedRows:
        """Return the entries of rows start <= row < stop, as views; None is no bound."""
        if start is None and stop is None:
            return self
        first, last = (
            default if bound is None else int(torch.searchsorted(self.rows, bound))
            for bound, default in ((start, 0), (stop, len(self.rows)))
        )
        return self.between(first, last)


def sum_by_row(
    ids: Tensor,
    source: Tensor,
    entries: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    width: int = 1,
    below: int | None = None,
) -> SummedRows:
    """Add up, for each id, the rows of `source` that its entries name.

    Args:
        ids: The row of the table that each entry belongs to, or its id in a dynamic table, [n], int32 or int64.
        source: [m, dim], contiguous, with the values to add.
        entries: The row of `source` that each entry takes, [n]; None: the entry of number i takes row i // width.
        scale: A factor for each entry, [n].
        width: The number of entries in turn that take the same row, without `entries`; n is a multiple of it.
        below: A number above all ids, none of which is negative; None: ids may have any value.

    Returns:
        The distinct ids, ascending, and their sums.

    >>> rows, values = sum_by_row(torch.tensor([7, 2, 7]), torch.tensor([[1.0], [2.0], [4.0]]))
    >>> rows.tolist(), values.tolist()
    ([2, 7], [[2.0], [5.0]])
    """
    is_plain = entries is None and scale is None
    ordered, order, distinct = ordered_ids(ids, width=width if is_plain else 1, rows=below)
    if is_plain and ids.shape[0] and is_summable(source):
        if distinct is None:
            distinct = 1 + int((ordered[1:] != ordered[:-1]).sum())
        return SummedRows(*sum_by_compiled(ordered.long(), order, source, distinct=distinct))
    found, counts = torch.unique_consecutive(ordered, return_counts=True)
    factors = None if scale is None else scale.index_select(0, order)
    if entries is not None:
        order = entries.index_select(0, order)
    elif not is_plain and width > 1:
        order = order.div(width, rounding_mode="floor")
    begins = counts.cumsum(0).sub_(counts)
    return SummedRows(found.long(), embed_bags(source, order, begins, scale=factors))


def embed_bags(
    weight: Tensor,
    ids: Tensor,
    begins: Tensor | None,
    *,
    width: int = 1,
    mean: bool = False,
    scale: Tensor | None = None,
    padding: int | None = None,
) -> Tensor:
    """Return the sum or mean of each bag's rows, as F.embedding_bag does, without its checks and without a gradient.

    Args:
        weight: The rows, [rows, dim].
        ids: The rows of all bags, [n].
        begins: The number of the first id of each bag, [bags], of the type of `ids`; None: bags have `width` ids each.
        width: The number of ids in each bag, at least 1.
        mean: True for means.
        scale: A factor for each id, [n]; for sums only.
        padding: An id that counts as none.
    """
    if not mean and scale is None and padding is None and ids.device == weight.device and is_poolable(weight):
        return pool_by_compiled(weight, ids, begins, width)
    if begins is None:
        begins = torch.arange(0, ids.shape[0], width, device=ids.device, dtype=ids.dtype)
    outputs = torch.embedding_bag(weight, ids, begins, False, int(mean), False, scale, False, padding)
    pooled: Tensor = outputs[0]
    return pooled


def row_gradient(summed: SummedRows, shape: torch.Size) -> Tensor:
    """Make a coalesced COO tensor of a table's gradient."""
    return make_coo(summed.rows.view(1, -1), summed.values, shape, is_coalesced=True)


def rows_of(gradient: Tensor) -> SummedRows:
    """Return a sparse gradient with the values of repeated rows added up, in the order of its entries.

    If none is repeated and rows ascend, the result has the memory of the argument.
    """
    indices, values = gradient._indices()[0], gradient._values()
    # Autograd does not keep the mark of what is coalesced.
    if gradient.is_coalesced() or _ascend(indices, values):
        return SummedRows(indices, values)
    return _summed(indices, values, gradient.shape)


def _ascend(indices: Tensor, values: Tensor) -> bool:
    if values.dim() == 2 and indices.is_contiguous() and is_summable(values):
        return ascend_by_compiled(indices)
    return bool((indices[1:] > indices[:-1]).all())


def add_row_gradients(left: SummedRows, right: SummedRows, shape: torch.Size) -> SummedRows:
    """Return the sum of two gradients of a table."""
    # Not the sum of two sparse tensors: whether that turns -0.0 into 0.0 depends on the memory layout of the two.
    if left.values.dim() == 2 and is_summable(left.values):
        values, others = left.values.contiguous(), right.values.contiguous()
        return SummedRows(*merge_by_compiled(left.rows, values, right.rows, others))
    return _summed(torch.cat([left.rows, right.rows]), torch.cat([left.values, right.values]), shape)


def _summed(indices: Tensor, values: Tensor, shape: torch.Size) -> SummedRows:
    if values.device.type == "cpu" and values.dim() == 2 and values.dtype in (torch.float32, torch.float64):
        return sum_by_row(indices, values.contiguous())
    summed = make_coo(indices.view(1, -1), values, shape).coalesce()
    return SummedRows(summed._indices()[0], summed._values())
