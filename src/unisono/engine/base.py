"""The interface between the trainer and an engine.

An engine sums the gradients of one step over its virtual ranks (the leaves of the plan's tree) and applies its
optimizer to the sum. The calls of a step are `start`; then for each leaf of this rank `close_forward` before the last
backward of the leaf and `close_leaf` after it; then `flush`, `finish`, `prepare` and `update`, or `abort` if the step
fails before `update`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from unisono.engine.step_transaction import StepTransaction
from unisono.engine.totals import NOTHING, Totals, Wants
from unisono.errors import LossError

__all__ = ["Engine", "Preparation", "Trained", "refuse_sparse"]


class Trained(NamedTuple):
    """The parameters that a step trains, with their plain names."""

    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]


class Preparation(NamedTuple):
    """The changes to the summed gradient of a step before the update."""

    factor: float
    """The factor by which the gradient is multiplied."""
    scaler: torch.amp.GradScaler | None
    """The scaler of a float16 step."""
    clip: float | None
    """The bound of its norm."""
    change: Callable[[], None] | None
    """Called before the norm is computed, with p.grad as the whole gradient. It may change or replace p.grad, in the
    same way on all ranks. It costs a copy of the gradient where ranks share it."""


class Engine(Protocol):
    """Sums the gradients of a step and applies them; the module's docstring gives the order of calls."""

    divides_update: bool
    """True if each rank updates a part of the weights alone."""
    copies_weights: bool
    """True if each weight is on several ranks, each of which has a copy of its own."""
    sends_early: bool
    """True if other ranks may get sums of this one before `flush`, from its last `close_forward` on."""

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step over leaves 0 … leaves - 1, and set all p.grad to None."""

    def close_forward(
        self,
        leaf: int,
        loss: Tensor,
        weight: float,
        *,
        new_buffers: bool,
        has_values: bool = False,
        wants: Wants = NOTHING,
    ) -> None:
        """Add the totals of a leaf, just before its last backward.

        Args:
            leaf: The number of the leaf.
            loss: The sum of its losses, a float32 scalar.
            weight: The sum of its weights.
            new_buffers: True if it changed a buffer that no earlier step had changed.
            has_values: True if the loss function gave further values for it.
            wants: What this rank wants to be done after the step.
        """

    def close_leaf(self, leaf: int) -> None:
        """Add the gradients of a leaf, whose last backward has ended."""

    def flush(self) -> None:
        """Send the sums that have not been sent yet. Every rank must call it, even one without leaves."""

    def finish(self) -> Totals:
        """Wait for the gradients of all ranks, and return the totals. Every rank must call it, even one without leaves.

        From this call on, the engine may run the step's deferred work: if possible while this rank has to wait, and
        at the latest before `update` returns. If ranks share the weights, the others may write them from this call on.
        """

    def prepare(self, preparation: Preparation) -> float | None:
        """Multiply the sum by a factor (at the latest in `update`), unscale it, and clip its norm to a bound.

        Every rank must call it. The weights are not touched yet.

        Returns:
            The norm before clipping, equal on all ranks; None without a bound.
        """

    def update(self, scaler: torch.amp.GradScaler | None) -> None:
        """Write the weights and the optimizer's state, unless the scaled gradient overflowed.

        Every rank must call it. Afterwards p.grad is the gradient that was applied, or None where no leaf gave one.
        """

    def close(self) -> None:
        """Release the parameters: another engine takes them. This one must not be used any more."""

    def abort(self, *, alike: bool) -> bool:
        """Discard the step, and set all p.grad to None. Other ranks may have to be notified by other means.

        Args:
            alike: True if all ranks discard this step for the same reason, and so at the same place. An engine may
                then wait for the other ranks.

        Returns:
            True if the weights are those from before the step.
        """


def refuse_sparse(names: Sequence[str], gradients: Sequence[Tensor | None]) -> None:
    """Raise LossError for a sparse gradient of a parameter that no module with sparse=True holds."""
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None or gradient.layout is torch.strided:
            continue
        raise LossError(
            f"parameter {name!r} of shape {list(gradient.shape)} got a sparse gradient ({gradient.layout}), but no "
            "nn.Embedding or nn.EmbeddingBag with sparse=True holds it. Use such a module, built before the Trainer's "
            "first step, or call the function with sparse=False."
        )
