"""Adam and AdamW with fused=True, without the work in Python around torch's kernel.

For a small model that work takes longer than the kernel: 65 µs in a step of 0.85 ms. The kernel gets the arguments that
the optimizer's own `step` would pass, so the bits are the same. Unusual options are left to that `step`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

__all__ = ["FusedAdam"]

_NUMBER = (float, int)

_SETS = 8
"""The number of sets of gradients that may take turns."""


class _KernelArguments(NamedTuple):
    """The arguments of the kernel for one group, list by list, without the hyperparameters."""

    lists: tuple[list[Tensor], ...]
    """Places, gradients, both averages, the maxima of the second, and counts of steps."""
    numbers: list[ctypes.c_float]
    """The counts of steps as numbers in memory: an addition by torch costs 4 µs."""
    others: list[Tensor]
    """The counts of steps that are not float32, or not on the CPU."""


class _Known(NamedTuple):
    """The calls for some gradients, kept for later steps."""

    gradients: Sequence[Tensor | None]
    used: list[bool]
    amsgrad: list[bool]
    """The option of each group."""
    calls: list[_KernelArguments | None]
    """For each group; None if there is nothing to do."""


class FusedAdam:
    """Updates one rank's pieces by Adam or AdamW.

    Args:
        places: The tensors with the pieces' values, on the CPU; none of them requires a gradient.
        members: The numbers of the pieces in each parameter group.
        state: The state by place, as in an optimizer. `forget` must be called when its tensors are replaced by others.
    """

    def __init__(
        self, places: Sequence[Tensor], members: Sequence[Sequence[int]], state: Mapping[Tensor, Mapping[str, Any]]
    ) -> None:
        self._places, self._members, self._state = places, members, state
        self._known: list[_Known] = []
        """The newest is last. Several sets of gradients may take turns."""
        # The kernel takes one type at a time.
        self._is_plain = all(
            len({places[k].dtype for k in of_group}) <= 1
            and all(places[k].is_cpu and places[k].is_floating_point() for k in of_group)
            for of_group in members
        )

    @staticmethod
    def knows(optimizer: Optimizer, step: Any) -> bool:
        """Return True if this class can replace an optimizer's `step`, which is passed without torch's wrappers."""
        return type(optimizer) in (optim.Adam, optim.AdamW) and getattr(step, "__module__", None) == "torch.optim.adam"

    def forget(self) -> None:
        """Read the state again in the next step."""
        self._known = []

    def step(
        self, groups: Sequence[Mapping[str, Any]], gradients: Sequence[Tensor | None], used: Sequence[bool]
    ) -> bool:
        """Update the pieces that are used. Return True if it was done, False if nothing was changed.

        Args:
            groups: The parameter groups of the user's optimizer.
            gradients: The gradient of each piece.
            used: For each piece, True if it is used.
        """
        if not self._is_plain or not all(map(_is_usual, groups)):
            return False
        amsgrad = [group["amsgrad"] for group in groups]
        calls = None
        for known in self._known:
            if known.gradients is gradients and known.used == used and known.amsgrad == amsgrad:
                calls = known.calls
        if calls is None:
            calls = self._calls(gradients, used, amsgrad)
            if calls is None:
                return False
            self._known = [*self._known[1 - _SETS :], _Known(gradients, list(used), amsgrad, calls)]
        for group, call in zip(groups, calls, strict=True):
            if call is None:
                continue
            for number in call.numbers:
                number.value += 1.0
            for count in call.others:
                count.add_(1)
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            beta1, beta2 = group["betas"]
            kernel(
                *call.lists,
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=group["amsgrad"],
                maximize=group["maximize"],
            )
        return True

    def _calls(
        self, gradients: Sequence[Tensor | None], used: Sequence[bool], amsgrad: Sequence[bool]
    ) -> list[_KernelArguments | None] | None:
        """Return the kernel's arguments; None if a piece has no state yet, which the optimizer's first step makes."""
        calls: list[_KernelArguments | None] = []
        for of_group, keeps_maxima in zip(self._members, amsgrad, strict=True):
            chosen = [
                (self._places[k], gradient) for k in of_group if used[k] and (gradient := gradients[k]) is not None
            ]
            states = [state for place, _ in chosen if (state := self._state.get(place))]
            if len(states) < len(chosen):
                return None
            counts = [state["step"] for state in states]
            plain = [count.dtype == torch.float32 and count.device.type == "cpu" for count in counts]
            lists = (
                [place for place, _ in chosen],
                [gradient for _, gradient in chosen],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["max_exp_avg_sq"] for state in states] if keeps_maxima else [],
                counts,
            )
            numbers = [
                ctypes.c_float.from_address(c.data_ptr()) for c, is_plain in zip(counts, plain, strict=True) if is_plain
            ]
            others = [c for c, is_plain in zip(counts, plain, strict=True) if not is_plain]
            calls.append(_KernelArguments(lists, numbers, others) if chosen else None)
        return calls


def _is_usual(group: Mapping[str, Any]) -> bool:
    """Return True if a group asks for the kernel and has no tensors as hyperparameters."""
    if not group["fused"] or group["differentiable"] or group["capturable"]:
        return False
    beta1, beta2 = group["betas"]
    return (
        isinstance(group["lr"], _NUMBER)
        and isinstance(beta1, _NUMBER)
        and isinstance(beta2, _NUMBER)
        and isinstance(group["weight_decay"], _NUMBER)
        and isinstance(group["eps"], _NUMBER)
    )
