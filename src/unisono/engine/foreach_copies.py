"""Copies of many small tensors by few calls of torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["foreach_copy"]


def foreach_copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target. On a GPU, tensors of one dtype take one kernel together."""
    if targets[0].device.type == "cpu":
        torch._foreach_copy_(targets, sources)
        return
    # Given several dtypes at once, torch copies tensor by tensor.
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        into, come = groups.setdefault((target.dtype, source.dtype), ([], []))
        into.append(target)
        come.append(source)
    for into, come in groups.values():
        torch._foreach_copy_(into, come)
