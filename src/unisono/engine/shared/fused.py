"""Adam and AdamW with fused=True, without the work in Python around torch's kernel.

For a small model that work takes longer than the kernel: 65 µs in a step of 0.85 ms. The kernel is given what the
optimizer's own `step` would give it, so the bits are the same; whatever is unusual is left to that `step`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

__all__ = ["FusedAdam"]

_NUMBERS = ("lr", "weight_decay", "eps")


class FusedAdam:
    """The updates of one rank's pieces by Adam or AdamW.

    Args: places are where the pieces' values lie, on the CPU; none of them requires a gradient. members has, for each
        parameter group, the numbers of its pieces. state is by place, as in an optimizer.
    """

    def __init__(
        self, places: Sequence[Tensor], members: Sequence[Sequence[int]], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        self._places, self._members, self._state = places, members, state
        self._counts: dict[Tensor, tuple[Tensor, ctypes.c_float]] = {}
        """Each piece's count of steps, and the same as a number in memory: an addition by torch costs 4 µs."""
        # The kernel takes one type at a time.
        self._is_plain = all(
            len({places[k].dtype for k in of_group}) <= 1 and all(places[k].is_floating_point() for k in of_group)
            for of_group in members
        )

    @staticmethod
    def knows(optimizer: Optimizer, step: Any) -> bool:
        """Whether this can do what an optimizer does. Args: step is what its class calls, less torch's wrappers."""
        return type(optimizer) in (optim.Adam, optim.AdamW) and getattr(step, "__module__", None) == "torch.optim.adam"

    def step(
        self, groups: Sequence[Mapping[str, Any]], gradients: Sequence[Tensor | None], used: Sequence[bool]
    ) -> bool:
        """Update the pieces that are used. Args: groups are the user's. gradients and used are by piece.

        Returns: whether it was done; if not, nothing was changed.
        """
        if not self._is_plain or not all(map(_is_usual, groups)):
            return False
        calls = []
        for group, of_group in zip(groups, self._members, strict=True):
            chosen = [
                (self._places[k], gradient) for k in of_group if used[k] and (gradient := gradients[k]) is not None
            ]
            states = [state for place, _ in chosen if (state := self._state.get(place))]
            if len(states) < len(chosen):
                return False  # it comes into being in the first step
            if chosen:
                calls.append((group, chosen, states))
        for group, chosen, states in calls:
            steps = [self._count(place, state["step"]) for (place, _), state in zip(chosen, states, strict=True)]
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            kernel(
                [place for place, _ in chosen],
                [gradient for _, gradient in chosen],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if group["amsgrad"] else [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )
        return True

    def _count(self, place: Tensor, step: Tensor) -> Tensor:
        """Add one to a piece's count of steps."""
        known, number = self._counts.get(place, (None, None))
        if step is not known:
            if step.dtype != torch.float32 or step.device.type != "cpu":
                return step.add_(1)
            number = ctypes.c_float.from_address(step.data_ptr())
            self._counts[place] = step, number
        assert number is not None
        number.value += 1.0
        return step


def _is_usual(group: Mapping[str, Any]) -> bool:
    """Whether a group asks for the kernel, and has no tensors among its numbers."""
    if not group["fused"] or group["differentiable"] or group["capturable"]:
        return False
    return all(isinstance(number, (int, float)) for number in (*map(group.__getitem__, _NUMBERS), *group["betas"]))
