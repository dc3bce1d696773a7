"""Hooks that the user has registered on optimizers: whether there are any, and how they run around a step.

torch runs them in `Optimizer.step`, which engines that update parts of parameters do not call. They are those of one
optimizer (`register_step_pre_hook`), and those of all (`register_optimizer_step_pre_hook`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

__all__ = ["has_post_hooks", "has_pre_hooks", "is_hooked", "with_hooks"]

_pre_hooks_of = attrgetter("_optimizer_step_pre_hooks")
_post_hooks_of = attrgetter("_optimizer_step_post_hooks")


def has_pre_hooks(optimizers: Iterable[Optimizer]) -> bool:
    """Return True if hooks run before the step of one of these optimizers."""
    return bool(_global_optimizer_pre_hooks) or any(map(_pre_hooks_of, optimizers))


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
