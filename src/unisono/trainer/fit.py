"""The short form of the loop: training and evaluation in one call, with callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from unisono.arguments import function
from unisono.metrics.average import Average
from unisono.parallel.losses import loss_of
from unisono.text import a_type
from unisono.trainer.epoch import EpochResult
from unisono.trainer.epoch_batches import EpochBatches
from unisono.trainer.loop import Loop
from unisono.trainer.setup import no_loss_function
from unisono.trainer.step_gradients import Loss
from unisono.trainer.step_result import StepResult

__all__ = ["Callbacks", "Validation", "check_fit", "loss_alone", "run_epochs"]

Averages = dict[str, Average]


@dataclass(frozen=True, kw_only=True, slots=True)
class Callbacks:
    """Functions that `fit` calls with the Trainer and a result. If one returns True, the training ends."""

    on_step: Callable[[Any, StepResult], object] | None = None
    """After each step."""
    on_epoch: Callable[[Any, EpochResult], object] | None = None
    """After each epoch and its evaluation."""
    on_evaluation: Callable[[Any, Averages], object] | None = None
    """After each evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The evaluations of `fit`, and when they are due."""

    dataset: Any
    """None: no evaluation."""
    functions: Mapping[str, Loss]
    """The functions to evaluate, by name."""
    every_steps: int | None
    """Evaluate also within an epoch, after this many steps of the run; None: after each epoch alone."""
    options: Mapping[str, Any]
    """Further arguments of `Trainer.evaluate`."""

    def is_due(self, steps: int) -> bool:
        """Return True if an evaluation within an epoch is due after this many steps of the run."""
        return self.dataset is not None and self.every_steps is not None and steps % self.every_steps == 0

    def run(self, trainer: Any) -> Averages:
        """Evaluate all functions. Every rank must call it."""
        if self.dataset is None:
            return {}
        return {
            name: trainer.evaluate(function, self.dataset, name=name, **self.options)
            for name, function in self.functions.items()
        }


def check_fit(
    loss_fn: Any,
    metrics: Any,
    *,
    validation: Any,
    validate_every: Any,
    callbacks: Callbacks,
    options: Mapping[str, Any],
    known: Sequence[str],
) -> None:
    """Check the arguments of `Trainer.fit` before the first epoch.

    Args:
        loss_fn, metrics, validation, validate_every, callbacks: See `Trainer.fit`.
        options: Its further arguments.
        known: The names of all arguments that it takes.

    Raises:
        TypeError: A function cannot be called, an argument is unknown, or metrics is not a dict with names as keys.
        ValueError: There is no dataset to evaluate on.
    """
    if not callable(loss_fn):
        raise TypeError(no_loss_function(loss_fn, call="trainer.fit(loss_fn, dataset, ...)"))
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.5)
            advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise TypeError(f"trainer.fit has no argument {name!r}: {advice}")
    for name in ("on_step", "on_epoch", "on_evaluation"):
        if getattr(callbacks, name) is not None:
            function(name, getattr(callbacks, name))
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(f'metrics is {a_type(metrics)}; give functions by name, as {{"accuracy": function}}')
    for name, given in (
        ("metrics", metrics), ("validate_every", validate_every), ("on_evaluation", callbacks.on_evaluation)
    ):  # fmt: skip
        if given is not None and validation is None:
            raise ValueError(f"{name} is given, and no data to evaluate on: give validation=dataset as well")
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise TypeError(f"metrics has the key {name!r}; functions are given by names, which are strings")
        function(f"metrics[{name!r}]", metric, meant="give a function of the model and a micro-batch")


def loss_alone(loss_fn: Loss) -> Loss:
    """Return a loss function without the further values of its dict, for an evaluation."""
    return lambda model, batch: loss_of(loss_fn(model, batch))


def run_epochs(
    trainer: Any,
    loop: Loop,
    *,
    epochs: Iterator[int],
    loss_fn: Loss,
    make_batches: Callable[[], EpochBatches],
    validation: Validation,
    callbacks: Callbacks,
) -> list[EpochResult]:
    """Train for the epochs that are left, and return the results of all epochs since the start of the run.

    Args:
        trainer: The Trainer.
        loop: Its loop.
        epochs: The epochs that are left.
        loss_fn: The loss function.
        make_batches: Returns the batches that are left of the current epoch.
        validation: The evaluations.
        callbacks: The functions to call.
    """
    for epoch in epochs:
        evaluated: Averages | None = None
        is_over = False
        batches = make_batches()
        for batch in batches:
            result = trainer.step(loss_fn, batch)
            is_over = _calls(callbacks.on_step, trainer, result)
            evaluated = None
            if validation.is_due(trainer.steps_done):  # also where the training ends: a resume goes on behind it
                evaluated = validation.run(trainer)
                is_over = _calls(callbacks.on_evaluation, trainer, evaluated) or is_over
            # After a whole epoch and its evaluation, the next start goes on with the next epoch.
            if is_over and (evaluated is None or batches.left != 0):
                break
        if not is_over or loop.is_epoch_done:
            if evaluated is None:
                evaluated = validation.run(trainer)
                is_over = bool(evaluated) and _calls(callbacks.on_evaluation, trainer, evaluated)
            done = EpochResult(epoch=epoch, loss=loop.steps.mean_loss, validation=evaluated)
            loop.add_result(done)
            is_over = _calls(callbacks.on_epoch, trainer, done) or is_over
        if is_over and not loop.end_with_epoch():
            trainer.save()
            break
    return loop.results


def _calls(function: Callable[[Any, Any], object] | None, trainer: Any, value: Any) -> bool:
    return function is not None and function(trainer, value) is True
