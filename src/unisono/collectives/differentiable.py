"""Differentiable collectives of tensors whose sizes all ranks know.

The gradients are those of one process whose loss is the sum of the losses of all ranks. So the backward of a collective
is a collective, and every rank must run it: an `all_reduce` for `all_reduce`, a reduce for a broadcast, and so on.
Results of `attach` and `reduce` can be differentiated once, all others twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unisono.collectives import tensor_collectives
from unisono.collectives.group import Group
from unisono.collectives.reduce_ops import OpName

__all__ = ["all_gather_flat", "all_reduce", "all_to_all_flat", "attach", "reduce", "reduce_scatter"]


def all_reduce(group: Group, tensor: Tensor, op: OpName) -> Tensor:
    """Combine the tensors of all ranks. Min and max share the gradient among equal values, as `torch.amax` does."""
    return _DifferentiableAllReduce.apply(group, op, tensor)  # type: ignore[no-any-return, no-untyped-call]


def reduce(group: Group, tensor: Tensor, op: OpName, dst: int) -> Tensor:
    """Combine the tensors of all ranks on one; the others get a zero without dimensions that is part of the graph."""
    return _Reduce.apply(group, op, dst, tensor)  # type: ignore[no-any-return, no-untyped-call]


def reduce_scatter(group: Group, tensor: Tensor, op: OpName) -> Tensor:
    """Combine the tensors of all ranks, and return this rank's part of the first dimension. Parts are equal."""
    if op not in ("sum", "mean"):
        return all_reduce(group, tensor, op).chunk(group.size)[group.rank].clone()
    return _ReduceScatter.apply(group, op, tensor)  # type: ignore[no-any-return, no-untyped-call]


def all_gather_flat(group: Group, tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension."""
    return _AllGather.apply(group, tensor)  # type: ignore[no-any-return, no-untyped-call]


def all_to_all_flat(group: Group, tensor: Tensor, leaving: Sequence[int], coming: Sequence[int]) -> Tensor:
    """Send the r-th part to rank r, and return the parts received, concatenated along the first dimension."""
    return _AllToAll.apply(group, leaving, coming, tensor)  # type: ignore[no-any-return, no-untyped-call]


SendBack = Callable[[Sequence[Any]], Sequence[Tensor | None]]


def attach(
    sources: Sequence[Tensor], received: Sequence[Tensor], send_back: SendBack, *, zeros: bool = True
) -> tuple[Tensor, ...]:
    """Return the received tensors as results of this rank's own tensors, for autograd.

    Args:
        sources: The tensors that this rank has sent.
        received: The tensors that it has received.
        send_back: Exchanges the gradients of the received tensors between ranks, and returns those of the sources.
        zeros: True to pass zeros for tensors without a gradient; False for None.
    """
    # A rank that has sent nothing needs a graph too, since the other ranks wait for its backward.
    anchor = torch.zeros((), requires_grad=True)
    return _Attached.apply(send_back, list(received), zeros, anchor, *sources)  # type: ignore[no-any-return, no-untyped-call]


class _DifferentiableAllReduce(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, op: OpName, tensor: Tensor) -> Tensor:
        result = tensor_collectives.all_reduce(group, tensor, op)
        ctx.group, ctx.op = group, op
        if op not in ("sum", "mean"):
            ctx.save_for_backward(tensor, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        total = all_reduce(ctx.group, gradient, "sum")
        return None, None, _spread(ctx, total)


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, op: OpName, dst: int, tensor: Tensor) -> Tensor:
        if op in ("sum", "mean"):
            result = tensor_collectives.reduce(group, tensor, op, dst)
        else:
            everywhere = tensor_collectives.all_reduce(group, tensor, op)
            ctx.save_for_backward(tensor, everywhere)
            result = everywhere if group.rank == dst else None
        ctx.group, ctx.op, ctx.dst, ctx.like = group, op, dst, torch.empty_like(tensor, device="meta")
        ctx.device = tensor.device
        return tensor.new_zeros(()) if result is None else result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        if ctx.group.rank != ctx.dst:
            gradient = torch.zeros(ctx.like.shape, dtype=ctx.like.dtype, device=ctx.device)
        return None, None, None, _spread(ctx, tensor_collectives.broadcast(ctx.group, gradient, ctx.dst))


def _spread(ctx: Any, total: Tensor) -> Tensor:
    """Return the gradient of this rank's tensor, from that of the combined one."""
    group: Group = ctx.group
    op: OpName = ctx.op
    if op == "sum":
        return total
    if op == "mean":
        return total / group.size
    tensor: Tensor
    result: Tensor
    tensor, result = ctx.saved_tensors
    if op == "product":
        parts = all_gather_flat(group, tensor.reshape(1, -1))
        others = torch.cat([parts[: group.rank], parts[group.rank + 1 :]]).prod(0).reshape(tensor.shape)
        return total * others.conj()
    chosen = (tensor.detach() == result.detach()).to(total.dtype)
    return total * chosen / tensor_collectives.all_reduce(group, chosen, "sum")


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, op: OpName, tensor: Tensor) -> Tensor:
        ctx.group, ctx.op = group, op
        return tensor_collectives.reduce_scatter(group, tensor, op)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        whole = all_gather_flat(ctx.group, gradient)
        return None, None, whole / ctx.group.size if ctx.op == "mean" else whole


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor) -> Tensor:
        ctx.group = group
        return tensor_collectives.all_gather_flat(group, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, reduce_scatter(ctx.group, gradient, "sum")


class _AllToAll(Function):
    @staticmethod
    def forward(ctx: Any, group: Group, leaving: Sequence[int], coming: Sequence[int], tensor: Tensor) -> Tensor:
        ctx.group, ctx.leaving, ctx.coming = group, leaving, coming
        return tensor_collectives.all_to_all_flat(group, tensor, leaving, coming)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, Tensor]:
        return None, None, None, all_to_all_flat(ctx.group, gradient, ctx.coming, ctx.leaving)


class _Attached(Function):
    @staticmethod
    def forward(
        ctx: Any, send_back: SendBack, received: list[Tensor], zeros: bool, anchor: Tensor, *sources: Tensor
    ) -> Any:
        ctx.send_back = send_back
        ctx.set_materialize_grads(zeros)
        results = tuple(received)
        ctx.mark_non_differentiable(*[r for r in results if not (r.is_floating_point() or r.is_complex())])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, None, None, *ctx.send_back(gradients)
