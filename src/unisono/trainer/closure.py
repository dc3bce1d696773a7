"""Optimizers that evaluate the loss at other weights within a step, such as LBFGS and SAM.

They get a closure, as they do from a loop of plain torch. Each call of it computes the loss of the global batch and its
gradient at the present weights, with the random numbers of the step. The first evaluation of a step has already been
done: until weights are written, the closure returns its result again. All ranks see the same numbers, so their
optimizers decide the same.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from operator import attrgetter

import torch
from torch.optim import LBFGS, Optimizer

from unisono.engine import Engine, StepTransaction, Trained, parts_of
from unisono.engine.optimizer_hooks import refuse_changed_gradients

__all__ = ["check_closure", "needs_closure", "step_with_closure"]

_version_of = attrgetter("_version")


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if one of torch's optimizers cannot step without a closure."""
    return any(isinstance(part, LBFGS) for part in parts_of(optimizer))


def check_closure(optimizer: Optimizer, engine: Engine, *, scaled: bool) -> None:
    """Refuse a step whose optimizer cannot have a closure.

    Raises:
        ValueError: Ranks divide the update among them, several optimizers are stepped at once, or the loss is scaled.
    """
    if len(parts_of(optimizer)) > 1:
        raise ValueError("closure=True is for a step of one optimizer: name it, with optimizer=...")
    if engine.divides_update:
        raise ValueError(
            'with engine="shared" ranks divide the update among them, and an optimizer that asks for the loss at other '
            'weights needs all of them: give Trainer engine="collective".'
        )
    if scaled:
        raise ValueError(
            'autocast="fp16" scales the loss for one update, and an optimizer with a closure makes several: use "bf16"'
        )


def step_with_closure(
    optimizer: Optimizer, trained: Trained, loss: float, evaluate: Callable[[], float], step: StepTransaction
) -> None:
    """Perform an optimizer's step with a closure.

    If it fails, weights and the optimizer's state are restored, which takes memory for a copy of both.

    Args:
        optimizer: The optimizer.
        trained: The parameters.
        loss: The loss at the present weights, whose gradient p.grad is.
        evaluate: Computes loss and gradient at the present weights.
        step: The step under way.
    """
    parameters = trained.parameters
    weights = [p.detach().clone() for p in parameters]
    state = {p: deepcopy(values) for p, values in optimizer.state.items()}
    seen, value = [*map(_version_of, parameters)], loss
    gradients = [p.grad for p in parameters]

    @torch.enable_grad()
    def closure() -> float:
        nonlocal seen, value, gradients
        versions = [*map(_version_of, parameters)]
        if versions == seen:
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
        else:
            value = evaluate()
            seen, gradients = versions, [p.grad for p in parameters]
        return value

    try:
        with refuse_changed_gradients([optimizer], trained):
            optimizer.step(closure)
    except BaseException:
        with torch.no_grad():
            for p, weight in zip(parameters, weights, strict=True):
                p.copy_(weight)
                p.grad = None
        optimizer.state.clear()
        optimizer.state.update(state)
        step.writing = False
        raise
    step.run_deferred()
