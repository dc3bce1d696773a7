"""Where the state of an optimizer lies: beside its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.engine.norm import dense_strides

__all__ = ["follow_parameters", "placed"]


def placed(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return a tensor of an optimizer's state in the layout and on the device that the optimizer would choose."""
    if value.dim() and value.shape == parameter.shape:
        # torch's fused kernels read parameter, gradient and state in the order of memory.
        strides = dense_strides(parameter)
        if value.stride() == strides and value.device == parameter.device:
            return value
        return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=parameter.device).copy_(value)
    # As in Optimizer.load_state_dict: `step` stays on the CPU unless a kernel reads it.
    if key == "step" and not (group.get("fused") or group.get("capturable")):
        return value
    return value.to(parameter.device)


def follow_parameters(optimizers: Iterable[Optimizer]) -> None:
    """Move what optimizers have made or loaded to the device of their parameters, which were moved since.

    Adagrad makes its state when it is built.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor) and value.device != p.device:
                        optimizer.state[p][key] = placed(key, value, p, group)
