"""Hooks that the user has registered on optimizers: whether there are any, and how they run around a step.

torch runs them in `Optimizer.step`, which engines that update parts of parameters do not call. They are those of one
optimizer (`register_step_pre_hook`), and those of all (`register_optimizer_step_pre_hook`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

from unisono.engine.base import Trained
from unisono.engine.joint_optimizer import trained_by
from unisono.errors import UnisonoError

__all__ = [
    "StepCounter",
    "has_post_hooks",
    "has_pre_hooks",
    "is_hooked",
    "refuse_changed_gradients",
    "run_first",
    "with_hooks",
]

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


class _ChangedGradients:
    """Raises UnisonoError if gradients have changed since it was made: a hook that runs after those of the user.

    Args:
        trained: The parameters with these gradients.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        gradients = (p.grad for p in trained.parameters)
        self._before = [(gradient, -1 if gradient is None else gradient._version) for gradient in gradients]

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Compare; the hook itself."""
        for name, p, (before, version) in zip(*self._trained, self._before, strict=True):
            if p.grad is not before or (before is not None and before._version != version):
                raise UnisonoError(
                    f"a hook of {type(optimizer).__name__} has changed the gradient of {name!r} before its step: "
                    f"{', '.join(_names_of_pre_hooks(optimizer))}. What it changes on several ranks would be changed "
                    "several times, or on some ranks only. Give the function to the step, which calls it with the "
                    "whole gradient: trainer.step(..., on_gradients=function). Trainer(clip_grad_norm=...) clips."
                )


def has_pre_hooks(optimizers: Iterable[Optimizer]) -> bool:
    """Return True if hooks run before the step of one of these optimizers."""
    if _global_optimizer_pre_hooks:
        return True
    for each in optimizers:
        for hook in _pre_hooks_of(each).values():
            if not isinstance(hook, StepCounter):
                return True
    return False


def _names_of_pre_hooks(optimizer: Optimizer) -> list[str]:
    """Return the names of the user's hooks that run before an optimizer's step."""
    hooks = [*_global_optimizer_pre_hooks.values(), *_pre_hooks_of(optimizer).values()]
    users = [each for each in hooks if not isinstance(each, (StepCounter, _ChangedGradients))]
    return [getattr(each, "__qualname__", type(each).__qualname__) for each in users]


def has_post_hooks(optimizers: Iterable[Optimizer]) -> bool:
    """Return True if hooks run after the step of one of these optimizers."""
    return bool(_global_optimizer_post_hooks) or any(map(_post_hooks_of, optimizers))


def is_hooked(*optimizers: Optimizer) -> bool:
    """Return True if hooks run before or after the step of one of these optimizers."""
    return has_pre_hooks(optimizers) or has_post_hooks(optimizers)


def run_first(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook after the step of an optimizer that runs before those that have been registered."""
    handle: RemovableHandle = optimizer.register_step_post_hook(hook)
    _post_hooks_of(optimizer).move_to_end(handle.id, last=False)
    return handle


def with_hooks(optimizer: Optimizer, run: Callable[[], None]) -> Callable[[], None]:
    """Return a function that runs an optimizer's hooks around another, as torch does around `step`."""

    def run_with_optimizer(_: Optimizer) -> None:
        run()

    hooked: Callable[[Optimizer], None] = Optimizer.profile_hook_step(run_with_optimizer)
    return partial(hooked, optimizer)


@contextmanager
def refuse_changed_gradients(
    optimizers: Iterable[Optimizer], trained: Trained, *, in_turn: bool = False
) -> Iterator[None]:
    """Refuse hooks that change gradients before a step of some optimizers.

    What writes to `p.grad.data` is not seen, as torch does not count it.

    Args:
        optimizers: They.
        trained: The parameters with the gradients of the step.
        in_turn: True if each is stepped before the hooks of the next one run.

    Raises:
        UnisonoError: A hook has changed a gradient. No weight has been written, unless by optimizers stepped before.
    """
    with ExitStack() as hooks:
        for each in optimizers:
            if has_pre_hooks([each]):
                guard = _ChangedGradients(trained_by(each, trained) if in_turn else trained)
                hooks.callback(each.register_step_pre_hook(guard).remove)
        yield
