"""Looking rows up, with the gradient of the table as rows and values."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from unisono.embedding.row_sums import embed_bags, row_gradient, sum_by_row

__all__ = ["Bags", "look_up", "pool"]


class Bags(NamedTuple):
    """The ids of a pooled lookup."""

    ids: Tensor
    """All ids, [n]."""
    begins: Tensor
    """The number of the first id of each bag, [bags]."""
    width: int | None
    """The number of ids in each bag, if it is the same for all."""

    def numbers(self) -> Tensor:
        """Return the bag of each id, [n]."""
        of_bags = torch.arange(len(self.begins), device=self.ids.device)
        if self.width is not None:
            return of_bags.unsqueeze(1).expand(-1, self.width).reshape(-1)
        ends = torch.cat([self.begins[1:], self.begins.new_tensor([len(self.ids)])])
        return of_bags.repeat_interleave(ends - self.begins)


def look_up(weight: Tensor, ids: Tensor, *, padding: int | None) -> Tensor:
    """Return the rows of `weight` [rows, dim] that ids of any shape name, [*ids.shape, dim]."""
    found: Tensor = _LookUp.apply(weight, ids, padding)  # type: ignore[no-untyped-call]
    return found


def pool(
    weight: Tensor, bags: Bags, scale: Tensor | None, *, mode: Literal["sum", "mean"], padding: int | None
) -> Tensor:
    """Return the sum or mean of each bag's rows, [bags, dim].

    Args:
        weight: The table, [rows, dim].
        bags: The ids.
        scale: A factor for each id, [n]; for sums only.
        mode: How rows are put together. An empty bag gives zeros.
        padding: An id that counts as none; None: there is none.
    """
    pooled: Tensor = _Pool.apply(weight, scale, bags.ids, bags.begins, bags.width, mode, padding)  # type: ignore[no-untyped-call]
    return pooled


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding = weight.shape, padding
        return F.embedding(ids, weight.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        ids, gradient = ids.reshape(-1), gradient.reshape(-1, ctx.shape[1])
        entries = None
        if ctx.padding is not None:
            entries = (ids != ctx.padding).nonzero().view(-1)
            ids = ids[entries]
        summed = sum_by_row(ids, gradient.contiguous(), entries, rows=ctx.shape[0])
        return row_gradient(summed, ctx.shape), None, None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  torch gives them by position
        ctx: Any,
        weight: Tensor,
        scale: Tensor | None,
        ids: Tensor,
        begins: Tensor,
        width: int | None,
        mode: Literal["sum", "mean"],
        padding: int | None,
    ) -> Tensor:
        ctx.bags, ctx.mode, ctx.padding, ctx.shape = Bags(ids, begins, width), mode, padding, weight.shape
        ctx.weight = weight if scale is not None and scale.requires_grad else None
        ctx.save_for_backward(scale)
        factors = None if scale is None else scale.detach()
        return embed_bags(weight.detach(), ids, begins, mean=mode == "mean", scale=factors, padding=padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = ctx.saved_tensors
        bags, gradient, ids, width = ctx.bags, gradient.contiguous(), ctx.bags.ids, ctx.bags.width
        is_even = width is not None and ctx.padding is None
        # Bags of one width need no list of the bag of each id.
        entries: Any = None if is_even and ctx.weight is None else bags.numbers()
        of_scale = None
        if ctx.weight is not None:
            of_scale = (gradient[entries] * ctx.weight.detach()[ids]).sum(1)
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
        summed = sum_by_row(ids, gradient, entries, factors, rows=ctx.shape[0], width=max(width or 1, 1))
        return row_gradient(summed, ctx.shape), of_scale, None, None, None, None, None
