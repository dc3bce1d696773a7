"""Notices leftovers of a loop by hand: what is done between two steps although the Trainer does it, or drops it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from unisono.engine import Trained
from unisono.engine.optimizer_hooks import StepCounter

__all__ = ["LoopActions"]

_STEPPED = (
    "optimizer.step() has been called since the last trainer.step(...), which updates the weights itself: its gradient "
    "may have been applied twice. Leave optimizer.step() and optimizer.zero_grad() out of the loop."
)
_CHANGED = (
    "the loop has changed the gradient of {name!r} since the last trainer.step(...), by a backward pass of its own or "
    "by clipping, which has no effect: a step computes the gradient of its loss function alone. Add such terms to what "
    "that returns, and clip by Trainer(clip_grad_norm=...)."
)


class LoopActions:
    """Compares optimizers and gradients after a step with what they are before the next one.

    Gradients are compared before the second step alone, since a loop does the same in each turn.

    Args:
        optimizers: Those that the Trainer steps.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._counters = [StepCounter.of(optimizer) for optimizer in optimizers]
        self._has_stepped = False
        self._left: dict[int, tuple[int, int]] | None = None
        """After the first step, the gradient of each parameter and its version, by `id`; otherwise None."""
        self._message: str | None = None
        self._is_told = False

    def begin(self, trained: Trained) -> None:
        """Look at what the loop has done, before a step."""
        if self._has_stepped and any(counter.count for counter in self._counters):
            self._message = _STEPPED
        elif self._left is not None:
            for name, p in zip(*trained, strict=True):
                gradient = p.grad
                if gradient is None or self._left.get(id(p)) == (id(gradient), gradient._version):
                    continue
                if gradient.any():  # otherwise it was set to zero
                    self._message = _CHANGED.format(name=name)
                    break
        self._left = None

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

    def end(self, trained: Trained) -> None:
        """Note what a step has left."""
        for counter in self._counters:
            counter.count = 0
        if not self._has_stepped:
            self._left = {id(p): (id(p.grad), p.grad._version) for p in trained.parameters if p.grad is not None}
            self._has_stepped = True

    def warning(self) -> str | None:
        """Return a warning, once, if there is one."""
        if self._message is None or self._is_told:
            return None
        self._is_told = True
        return self._message
