"""Scaling, clipping and update if p.grad is the whole gradient, as in the local and in the collective engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.engine.base import Preparation, Trained
from unisono.engine.joint_optimizer import parts_of
from unisono.engine.norm import block_norms, blocks_of, clip_factor, dense_strides, global_norm, in_memory_order
from unisono.engine.optimizer_hooks import refuse_changed_gradients

__all__ = ["prepare_whole", "update_whole"]


def prepare_whole(parameters: Sequence[Tensor], optimizer: Optimizer, preparation: Preparation) -> float | None:
    """Multiply, unscale and clip p.grad. Return the norm before clipping, None without a bound; see `Engine`."""
    factor, scaler, clip, change = preparation
    if factor != 1.0 and (gradients := _values_of(parameters)):
        torch._foreach_mul_(gradients, factor)
    if scaler is not None:
        scaler.unscale_(optimizer)
    if change is not None:
        change()
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
        torch._foreach_mul_(_values_of(parameters), scale)
    return norm


def _values_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return all gradients that there are; of a sparse one the values of its rows."""
    return [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]


def update_whole(optimizer: Optimizer, scaler: torch.amp.GradScaler | None, trained: Trained) -> None:
    """Run the optimizer's step, which a scaler skips if the gradient overflowed.

    Raises:
        UnisonoError: A hook of the optimizer has changed a gradient.
    """
    _lay_out_state(optimizer)
    with refuse_changed_gradients(parts_of(optimizer), trained, in_turn=True):
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)


def _lay_out_state(optimizer: Optimizer) -> None:
    """Give the state of fused optimizers the strides of its parameters, where these have changed.

    torch's fused kernels take the elements of both in the order of memory, also after `model.to(memory_format=...)`, or
    after a state from elsewhere was loaded.
    """
    fused = ((part, group) for part in parts_of(optimizer) for group in part.param_groups if group.get("fused"))
    for part, p in ((part, p) for part, group in fused for p in group["params"] if p.dim() > 1):
        strides, state = p.stride(), part.state.get(p, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.stride() != strides and value.shape == p.shape:
                state[key] = torch.empty_strided(p.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
