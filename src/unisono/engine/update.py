"""The update on a rank that has the whole gradient in p.grad, as in the local and in the collective engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.engine.norm import block_norms, blocks_of, clip_factor, dense_strides, global_norm, in_memory_order

__all__ = ["prepare_whole", "update_whole"]


def prepare_whole(
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    *,
    factor: float,
    scaler: torch.amp.GradScaler | None,
    clip: float | None,
) -> float | None:
    """Finish p.grad: multiply, take the scale out, clip. Returns: the norm before it was clipped; see `Engine`."""
    # Of a sparse gradient, its values: those of its rows, one behind the other.
    gradients = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    if factor != 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)
    if scaler is not None:
        scaler.unscale_(optimizer)
    if clip is None:
        return None
    blocks = [
        block
        for p in parameters
        if p.grad is not None
        for block in blocks_of(
            p.grad._values().view(-1) if p.grad.is_sparse else in_memory_order(p.grad, dense_strides(p))
        )
    ]
    norm = global_norm(block_norms(blocks).tolist())
    scale = clip_factor(norm, clip)
    if scale < 1.0:
        torch._foreach_mul_(gradients, scale)
    return norm


def update_whole(optimizer: Optimizer, scaler: torch.amp.GradScaler | None) -> None:
    """Let the optimizer write the weights; a scaler leaves that out if the gradient overflowed."""
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
