"""Looking rows up, with the gradient of the table as rows and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unisono.embedding.row_sums import embed_bags, row_gradient, sum_by_row

__all__ = ["Bags", "Locate", "look_up", "pool"]

Locate = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns a tensor with the values of ids, [m, dim], and the row of each id in it, [n]."""


class Bags(NamedTuple):
    """The ids of a pooled lookup."""

    ids: Tensor
    """All ids, [n]."""
    begins: Tensor | None
    """The number of the first id of each bag, [bags]; None if all have `width` ids."""
    width: int | None
    """The number of ids in each bag, at least 1; None if it differs, or is 0."""

    def starts(self) -> Tensor:
        """Return the number of the first id of each bag, [bags]."""
        if self.begins is not None:
            return self.begins
        assert self.width is not None
        return torch.arange(0, len(self.ids), self.width, device=self.ids.device, dtype=self.ids.dtype)

    def numbers(self) -> Tensor:
        """Return the bag of each id, [n]."""
        starts = self.starts()
        of_bags = torch.arange(len(starts), device=self.ids.device)
        if self.width is not None:
            return of_bags.unsqueeze(1).expand(-1, self.width).reshape(-1)
        ends = torch.cat([starts[1:], starts.new_tensor([len(self.ids)])])
        return of_bags.repeat_interleave(ends - starts)

    def of_int64(self) -> Bags:
        """Return the same bags with ids of 64 bits."""
        return Bags(self.ids.long(), None if self.begins is None else self.begins.long(), self.width)

    def without(self, id: int, scale: Tensor | None) -> tuple[Bags, Tensor | None]:  # noqa: A002
        """Return the bags without one id, and the factors of those that are left."""
        is_kept = self.ids != id
        kept = is_kept.nonzero().view(-1)
        if len(kept) == len(self.ids):
            return self, scale
        before = torch.cat([kept.new_zeros(1), is_kept.cumsum(0)])
        bags = Bags(self.ids.index_select(0, kept), before.index_select(0, self.starts()), None)
        return bags, None if scale is None else scale.index_select(0, kept)


def look_up(weight: Tensor, ids: Tensor, *, padding: int | None, locate: Locate | None = None) -> Tensor:
    """Return the rows that ids of any shape name, [*ids.shape, dim].

    Args:
        weight: The table, [rows, dim].
        ids: The ids.
        padding: An id whose row gets no gradient; None: there is none.
        locate: Finds ids of one dimension; None: they are rows of `weight`.
    """
    found: Tensor = _LookUp.apply(weight, ids, padding, locate)  # type: ignore[no-untyped-call]
    return found


def pool(
    weight: Tensor,
    bags: Bags,
    scale: Tensor | None,
    *,
    mode: Literal["sum", "mean"],
    padding: int | None,
    locate: Locate | None = None,
) -> Tensor:
    """Return the sum or mean of each bag's rows, [bags, dim].

    Args:
        weight: The table, [rows, dim].
        bags: The ids.
        scale: A factor for each id, [n]; for sums only.
        mode: How rows are put together. An empty bag gives zeros.
        padding: An id that counts as none; None: there is none. Not together with `locate`.
        locate: Finds ids; None: they are rows of `weight`.
    """
    pooled: Tensor = _Pool.apply(weight, scale, *bags, mode, padding, locate)  # type: ignore[no-untyped-call]
    return pooled


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, locate: Locate | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding, ctx.rows = weight.shape, padding, weight.shape[0] if locate is None else None
        if locate is None:
            return F.embedding(ids, weight.detach())
        source, rows = locate(ids.reshape(-1))
        return F.embedding(rows.view(ids.shape), source.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        ids, gradient = ids.reshape(-1), gradient.reshape(-1, ctx.shape[1])
        entries = None
        if ctx.padding is not None:
            entries = (ids != ctx.padding).nonzero().view(-1)
            ids = ids[entries]
        summed = sum_by_row(ids, gradient.contiguous(), entries, below=ctx.rows)
        return row_gradient(summed, ctx.shape), None, None, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  torch gives them by position
        ctx: Any,
        weight: Tensor,
        scale: Tensor | None,
        ids: Tensor,
        begins: Tensor | None,
        width: int | None,
        mode: Literal["sum", "mean"],
        padding: int | None,
        locate: Locate | None,
    ) -> Tensor:
        ctx.width, ctx.mode, ctx.padding, ctx.shape = width, mode, padding, weight.shape
        ctx.rows = weight.shape[0] if locate is None else None
        source, rows = (weight.detach(), ids) if locate is None else locate(ids)
        ctx.found = (source, rows) if scale is not None and scale.requires_grad else None
        ctx.save_for_backward(ids, begins, scale)  # so that autograd finds a change in place before backward
        factors = None if scale is None else scale.detach()
        return embed_bags(source, rows, begins, width=width or 1, mean=mode == "mean", scale=factors, padding=padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, begins, scale = ctx.saved_tensors
        gradient, width = gradient.contiguous(), ctx.width
        is_even = width is not None and ctx.padding is None
        # Bags of one width need no list of the bag of each id.
        entries: Any = None if is_even and ctx.found is None else Bags(ids, begins, width).numbers()
        of_scale = None
        if ctx.found is not None:
            source, rows = ctx.found
            of_scale = (gradient[entries] * source[rows]).sum(1)
            if ctx.padding is not None:
                of_scale.masked_fill_(ids == ctx.padding, 0.0)
        if ctx.padding is not None:
            kept = (ids != ctx.padding).nonzero().view(-1)
            ids, entries = ids[kept], entries[kept]
            scale = None if scale is None else scale[kept]
        if ctx.mode == "mean":
            counts: Tensor | int = max(width or 1, 1)
            if not is_even:
                counts = torch.bincount(entries, minlength=len(gradient)).clamp_(min=1).unsqueeze(1)
            gradient = gradient / counts
        factors = None if scale is None else scale.detach()
        summed = sum_by_row(ids, gradient, entries, factors, width=max(width or 1, 1), below=ctx.rows)
        return row_gradient(summed, ctx.shape), of_scale, None, None, None, None, None, None
