"""Hooks that the user has registered on optimizers: whether there are any, and how they run around a step.

torch runs them in `Optimizer.step`, which engines that update parts of parameters do not call. They are those of one
optimizer (`register_step_pre_hook`), and those of all (`register_optimizer_step_pre_hook`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["StepCounter", "has_post_hooks", "has_pre_hooks", "is_hooked", "with_hooks"]

_pre_hooks_of = attrgetter("_optimizer_step_pre_hooks")
_post_hooks_of = attrgetter("_optimizer_step_post_hooks")


class StepCounter:
    """Counts the calls of an optimizer's `step` that are not the Trainer's, by a hook that is none of the user's."""

    def __init__(self) -> None:
        self.count = 0
        self.is_paused = False

    @classmethod
    def of(cls, optimizer: Optimizer) -> StepCounter:
        """Return the counter of an optimizer, which has one."""
        for hook in _pre_hooks_of(optimizer).values():
            if isinstance(hook, cls):
                return hook
        optimizer.register_step_pre_hook(made := cls())
        return made

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Count a call; the hook itself."""
        self.count += not self.is_paused


def has_pre_hooks(optimizers: Iterable[Optimizer]) -> bool:
    """Return True if hooks run before the step of one of these optimizers."""
    if _global_optimizer_pre_hooks:
        return True
    for each in optimizers:
        for hook in _pre_hooks_of(each).values():
            if not isinstance(hook, StepCounter):
                return True
    return False


def has_post_hooks(optimizers: Iterable[Optimizer]) -> bool:
    """Return True if hooks run after the step of one of these optimizers."""
    return bool(_global_optimizer_post_hooks) or any(map(_post_hooks_of, optimizers))


def is_hooked(*optimizers: Optimizer) -> bool:
    """Return True if hooks run before or after the step of one of these optimizers."""
    return has_pre_hooks(optimizers) or has_post_hooks(optimizers)


def with_hooks(optimizer: Optimizer, run: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs an optimizer's hooks around another, as torch does around `step`."""

    def run_with_optimizer(_: Optimizer) -> None:
        run()

    hooked: Callable[[Optimizer], None] = Optimizer.profile_hook_step(run_with_optimizer)
    return partial(hooked, optimizer)
