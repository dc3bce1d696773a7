"""SGD without momentum and weight decay, without the work in Python around torch's addition.

For a small model that work takes longer than the addition: 15 µs in a step of 1 ms. The addition is that of the
optimizer's own `step`, so the bits are the same. Other options are left to that `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

__all__ = ["PlainSGD"]


class PlainSGD:
    """Updates one rank's pieces by SGD.

    Args:
        places: The tensors with the pieces' values; none of them requires a gradient.
        members: The numbers of the pieces in each parameter group.
    """

    def __init__(self, places: Sequence[Tensor], members: Sequence[Sequence[int]]) -> None:
        self._places, self._members = places, members

    @staticmethod
    def knows(optimizer: Optimizer, step: Any) -> bool:
        """Return True if this class can replace an optimizer's `step`, which is passed without torch's wrappers."""
        return type(optimizer) is optim.SGD and getattr(step, "__module__", None) == "torch.optim.sgd"

    def forget(self) -> None:
        """Do nothing: there is no state."""

    def step(
        self, groups: Sequence[Mapping[str, Any]], gradients: Sequence[Tensor | None], used: Sequence[bool]
    ) -> bool:
        """Update the pieces that are used, or change nothing and return False; see `FusedAdam.step`."""
        calls = []
        for group, of_group in zip(groups, self._members, strict=True):
            if not _is_plain(group):
                return False
            chosen = [(self._places[k], gradients[k]) for k in of_group if used[k]]
            places = [place for place, gradient in chosen if gradient is not None]
            added = [gradient for _, gradient in chosen if gradient is not None]
            if any(gradient.is_sparse for gradient in added):
                return False
            calls.append((places, added, group["lr"]))
        for places, added, rate in calls:
            if places:
                torch._foreach_add_(places, added, alpha=-rate)
        return True


def _is_plain(group: Mapping[str, Any]) -> bool:
    return (
        type(group["lr"]) in (float, int)
        and type(group["momentum"]) in (float, int)
        and type(group["weight_decay"]) in (float, int)
        and group["momentum"] == 0
        and group["weight_decay"] == 0
        and not (group["maximize"] or group["differentiable"] or group["fused"])
    )
