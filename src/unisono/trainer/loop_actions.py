"""Notices leftovers of a loop by hand: what is done between two steps although the Trainer does it, or drops it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from unisono.engine import Trained
from unisono.engine.optimizer_hooks import StepCounter, has_pre_hooks

__all__ = ["LeftGradients", "LoopActions"]

_STEPPED = (
    "optimizer.step() has been called since the last trainer.step(...), which updates the weights itself: its gradient "
    "may have been applied twice. Leave optimizer.step() and optimizer.zero_grad() out of the loop."
)
_CHANGED = (
    "the loop has changed the gradient of {name!r} since the last trainer.step(...), by a backward pass of its own or "
    "by clipping, which has no effect: a step computes the gradient of its loss function alone. Add such terms to what "
    "that returns, and clip by Trainer(clip_grad_norm=...)."
)
_HIDDEN = (
    "hooks that run before the step of an optimizer find no gradients here, as each rank has a part of them elsewhere. "
    "Clip by Trainer(clip_grad_norm=...), whose steps also return the norm."
)

_STEPS_COMPARED = 16
"""Of a Trainer with several optimizers, whose steps a loop may call in turns of several each."""


class LeftGradients:
    """The gradients that the last step of a Trainer has left, whichever of its optimizers it was of.

    Known after the first steps only, since a loop does the same in each turn.

    Args:
        optimizers: All optimizers of the Trainer.
    """

    def __init__(self, optimizers: Collection[Optimizer]) -> None:
        self._optimizers = optimizers
        self._steps_to_note = 1 if len(optimizers) == 1 else _STEPS_COMPARED
        self._left: dict[int, tuple[int, int]] | None = None
        """The gradient of each parameter and its version, by `id`."""

    def note(self) -> None:
        """Note what a step has left."""
        self._left = None
        if self._steps_to_note:
            self._steps_to_note -= 1
            groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
            parameters = itertools.chain.from_iterable(groups)
            self._left = {id(p): (id(p.grad), p.grad._version) for p in parameters if p.grad is not None}

    def changed(self, trained: Trained) -> str | None:
        """Return the name of a parameter whose gradient is another one now, and not zero; None if there is none.

        To be called before a step, which writes gradients itself: nothing is known until `note`.
        """
        left, self._left = self._left, None
        if left is None:
            return None
        for name, p in zip(*trained, strict=True):
            gradient = p.grad
            if gradient is None or left.get(id(p)) == (id(gradient), gradient._version):
                continue
            if gradient.any():  # otherwise it was set to zero
                return name
        return None


class LoopActions:
    """Compares optimizers and gradients after a step of some optimizers with what they are before the next one.

    Args:
        optimizers: Those that are stepped.
        left: The gradients that steps leave; those of other optimizers of the Trainer write there as well.
    """

    def __init__(self, optimizers: Sequence[Optimizer], left: LeftGradients) -> None:
        self.hides_gradients = False
        """True if p.grad has no gradient when the optimizers' hooks run."""
        self._optimizers = optimizers
        self._counters = [StepCounter.of(optimizer) for optimizer in optimizers]
        self._has_stepped = False
        self._left = left
        self._message: str | None = None
        self._is_told = False

    def begin(self, trained: Trained) -> None:
        """Look at what the loop has done, before a step."""
        name = self._left.changed(trained)
        if self._has_stepped and any(counter.count for counter in self._counters):
            self._message = _STEPPED
        elif self._has_stepped and name is not None:
            self._message = _CHANGED.format(name=name)
        elif self.hides_gradients and has_pre_hooks(self._optimizers):
            self._message = _HIDDEN

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Return a context in which the Trainer steps the optimizers."""
        for counter in self._counters:
            counter.is_paused = True
        try:
            yield
        finally:
            for counter in self._counters:
                counter.is_paused = False

    def end(self) -> None:
        """Note what a step has left."""
        for counter in self._counters:
            counter.count = 0
        self._has_stepped = True
        self._left.note()

    def warning(self) -> str | None:
        """Return a warning, once, if there is one."""
        if self._message is None or self._is_told:
            return None
        self._is_told = True
        return self._message
