"""Batch normalisation over the batches of all ranks, as one differentiable function.

The statistics of unequal shares are combined by the formula of Chan, Golub and LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances" (1979), in float64 and in rank order, so all ranks get the same bits.
Forward is one all-gather of 2C + 2 numbers, backward one all-reduce of 2C. The layer is in `sync_batch_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unisono.collectives import differentiable, tensor_collectives
from unisono.collectives.group import Group
from unisono.errors import RankMismatchError
from unisono.text import name_ranks

__all__ = ["normalize_over_ranks"]

# Flags of a rank's call, in the second number that it sends: it records gradients, the input needs a gradient.
_BACKWARD, _INPUT = 1, 2


def normalize_over_ranks(
    values: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    running: tuple[Tensor, Tensor] | None,
    momentum: float,
    eps: float,
    link: Group,
) -> Tensor:
    """Normalise each channel by its mean and variance over the batches of all ranks. Every rank must call it.

    Gradients are those of one process whose loss is the sum of the ranks' losses; those of weight and bias are this
    rank's share. Twice differentiable.

    Args:
        values: The input, [N, C, ...]. N may differ between ranks and be 0.
        weight: The factor of each channel, [C]; None for 1.
        bias: The number added to each channel, [C]; None for 0.
        running: The running mean and variance, moved in place by `momentum` towards those of the batch (the variance
            unbiased); None if there are none.
        momentum: The weight of this batch in the running statistics.
        eps: The number added to the variance for numerical stability.
        link: The ranks.

    Raises:
        ValueError: There is only one value per channel on all ranks together.
        RankMismatchError: Some ranks record gradients and others do not: the former would wait for the latter in
            backward. Found on the CPU alone.
    """
    recording = torch.is_grad_enabled()
    call = _NormalizationCall(running=running, momentum=momentum, eps=eps, link=link, recording=recording)
    out: Tensor = _Normalize.apply(values, weight, bias, call)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class _NormalizationCall:
    """The arguments of one call that are not differentiated."""

    running: tuple[Tensor, Tensor] | None
    momentum: float
    eps: float
    link: Group
    recording: bool


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, weight: Tensor | None, bias: Tensor | None, call: _NormalizationCall
    ) -> Tensor:
        wide = _wide(values)
        needs = ctx.needs_input_grad
        told = (_BACKWARD * any(needs[:3]) + _INPUT * needs[0]) if call.recording else 0
        _compare(call.link, "SyncBatchNorm", values)
        rows = torch.stack(tensor_collectives.all_gather(call.link, _summary(values, told)))
        ctx.travels = needs[0]
        if values.device.type == "cpu":  # on other devices it would wait for the device
            ctx.travels = _check_agreement([int(told) for told in rows[:, 1].tolist()], call.link)
        total, mean, variance = _combine(rows)
        if values.numel() <= values.shape[1] and total == 1:
            raise ValueError(
                f"one value per channel (shape {list(values.shape)} here) on all {len(rows)} ranks together: there is "
                "no variance to normalise by. Use a larger batch, or call eval() on the layer."
            )
        if call.running is not None:
            share = call.momentum * total.clamp(max=1)  # the batch may be empty everywhere
            unbiased = variance * (total / (total - 1).clamp(min=1))
            for buffer, found in zip(call.running, (mean, unbiased), strict=True):
                buffer.copy_(buffer * (1 - share) + found * share)
        mean, variance = mean.to(wide), variance.to(wide)
        ctx.save_for_backward(values, weight, mean, variance, total)
        ctx.eps, ctx.link = call.eps, call.link
        ctx.dtypes = [None if parameter is None else parameter.dtype for parameter in (weight, bias)]
        if not values.numel():
            return torch.empty_like(values)
        return F.batch_norm(values, mean, variance, _to(weight, wide), _to(bias, wide), eps=call.eps)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        saved = ctx.saved_tensors  # once only: checkpointing refuses to return them twice
        if ctx.travels:
            _compare(ctx.link, "backward of SyncBatchNorm", saved[0])
        gradients = _differentiable_backward if torch.is_grad_enabled() else _backward
        grad_values, sums = gradients(ctx, grad, saved)
        along, plain = (None if dtype is None else own.to(dtype) for own, dtype in zip(sums, ctx.dtypes, strict=True))
        return grad_values, along, plain, None


def _backward(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor | None, Tensor]:
    """Return the gradient of the values, and this rank's sums of grad times normalised value and of grad: [2, C]."""
    values, weight, mean, variance, total = saved
    wide = mean.dtype
    scale = torch.ones_like(mean) if weight is None else weight.to(wide)
    sums = mean.new_zeros(2, len(mean))
    if values.numel():
        sums = _sums(grad, values, scale, mean, variance, eps=ctx.eps)
    everywhere = tensor_collectives.all_reduce(ctx.link, sums.double(), "sum") if ctx.travels else None
    if everywhere is None or not ctx.needs_input_grad[0]:
        return None, sums
    if not values.numel():
        return torch.empty_like(values), sums
    slope = scale * (variance + ctx.eps).rsqrt()
    along, plain = (everywhere / total).to(wide) * -slope
    grad_values = F.batch_norm(values, mean, variance, along, plain, eps=ctx.eps)
    return grad_values.addcmul_(grad, slope.view(-1, *[1] * (values.dim() - 2))), sums


def _sums(grad: Tensor, values: Tensor, scale: Tensor, mean: Tensor, variance: Tensor, *, eps: float) -> Tensor:
    """Return the sums of grad times normalised value and of grad, without the gradient of the values: [2, C]."""
    if values.device.type != "cuda":
        # In its evaluation form, this kernel can return both sums without the gradient.
        _, along, plain = torch.ops.aten.native_batch_norm_backward(
            grad, values, scale, mean, variance, None, None, False, eps, [False, True, True]
        )
        return torch.stack([along, plain])
    layout = torch.channels_last if values.dim() == 4 else torch.contiguous_format
    if not values.is_contiguous(memory_format=layout):
        layout = torch.contiguous_format
    grad, values = grad.contiguous(memory_format=layout), values.contiguous(memory_format=layout)
    inverse = (variance + eps).rsqrt()
    _, _, along, plain = torch.batch_norm_backward_reduce(grad, values, mean, inverse, scale, False, True, True)
    return torch.stack([along, plain])


def _differentiable_backward(ctx: Any, grad: Tensor, saved: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return the same as `_backward`, by differentiable operations, for create_graph=True, with three all-reduces."""
    values, weight, mean, _, total = saved
    around = [0, *range(2, values.dim())]
    shape = (-1, *[1] * (values.dim() - 2))
    x, dy = values.to(mean.dtype), grad.to(mean.dtype)
    count = total.clamp(min=1).to(mean.dtype)
    mean = differentiable.all_reduce(ctx.link, x.sum(around), "sum") / count
    centred = x - mean.view(shape)
    variance = differentiable.all_reduce(ctx.link, centred.square().sum(around), "sum") / count
    inverse = (variance + ctx.eps).rsqrt().view(shape)
    normal = centred * inverse
    sums = torch.stack([(dy * normal).sum(around), dy.sum(around)])
    along, plain = differentiable.all_reduce(ctx.link, sums, "sum") / count
    slope = inverse if weight is None else inverse * weight.to(mean.dtype).view(shape)
    return (slope * (dy - plain.view(shape) - normal * along.view(shape))).to(values.dtype), sums


def _compare(link: Group, call: str, values: Tensor) -> None:
    """In check mode, compare the call with those of the other ranks; batches may differ."""
    if link.check is not None:
        link.check.compare(f"{call} over {values.shape[1]} channels", described=f"a batch of {values.shape[0]}")


def _summary(values: Tensor, told: int) -> Tensor:
    """Return what a rank sends: number of values per channel, flags, and mean and variance of each channel."""
    channels, wide = values.shape[1], _wide(values)
    row = torch.zeros(2 + 2 * channels, dtype=torch.float64, device=values.device)
    row[0] = values.numel() // channels
    row[1] = told
    if values.numel():
        # The kernel takes the type of the statistics of 16-bit values from the buffers that it could update.
        unused = torch.zeros(2, channels, dtype=wide, device=values.device)
        row[2 : 2 + channels], row[2 + channels :] = torch.batch_norm_update_stats(values, unused[0], unused[1], 0.0)
    return row


def _combine(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of values, the mean and the biased variance over all ranks, from each rank's row."""
    counts, (means, variances) = rows[:, :1], rows[:, 2:].chunk(2, dim=1)
    total = counts.sum()
    divisor = total.clamp(min=1)
    mean = (means * counts).sum(0) / divisor
    variance = ((variances + (means - mean).square()) * counts).sum(0) / divisor
    return total, mean, variance


def _check_agreement(told: list[int], link: Group) -> bool:
    """Return True if any rank needs the sums of backward.

    Raises:
        RankMismatchError: Some ranks record gradients and others do not.
    """
    record = [rank for rank, flags in zip(link.ranks, told, strict=True) if flags & _BACKWARD]
    others = [rank for rank in link.ranks if rank not in record]
    if record and others:
        raise RankMismatchError(
            f"{name_ranks(record)} record gradients in this SyncBatchNorm and {name_ranks(others)} do not, so "
            "backward would wait for them for ever. Use torch.no_grad and requires_grad in the same way on all ranks."
        )
    return any(flags & _INPUT for flags in told)


def _wide(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
