"""The training of a run in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import signature
from typing import Any

from unisono.arguments import whole
from unisono.job.user_function import refuse_inside
from unisono.metrics.average import Average
from unisono.trainer.epoch import EpochResult
from unisono.trainer.epoch_batches import EpochBatches
from unisono.trainer.fit import Callbacks, Validation, check_fit, loss_alone, run_epochs
from unisono.trainer.inference import Inference
from unisono.trainer.step import Loss
from unisono.trainer.step_result import StepResult

__all__ = ["ShortForm"]


class ShortForm(Inference):
    """The method of a Trainer that trains and evaluates in one call."""

    epochs: Callable[..., Iterator[int]]
    batches: Callable[..., EpochBatches]

    def fit(
        self,
        loss_fn: Loss,
        dataset: Any,
        *,
        batch_size: int | Mapping[str, int] | None = None,
        epochs: int,
        max_steps: int | None = None,
        validation: Any = None,
        metrics: Mapping[str, Loss] | None = None,
        validate_every: int | None = None,
        on_step: Callable[[Any, StepResult], object] | None = None,
        on_epoch: Callable[[Any, EpochResult], object] | None = None,
        on_evaluation: Callable[[Any, dict[str, Average]], object] | None = None,
        **options: Any,
    ) -> list[EpochResult]:
        """Train for some epochs and evaluate after each: the short form of the loop.

        Every rank must call it. A model all of which is in evaluation mode, as from_pretrained returns it, is put into
        training mode. A callback gets the Trainer and a result, on every rank; if it returns True, as it must on all
        ranks, the state is saved and the training ends.

        Args:
            loss_fn: See `step`.
            dataset: The dataset to train on.
            batch_size: See `batches`. Needed unless there is a batch sampler.
            epochs, max_steps: See `epochs`.
            validation: The dataset to evaluate on after each epoch. None: no evaluation.
            metrics: The functions to evaluate on it, by name. None: the loss.
            validate_every: The number of steps of the run after which to evaluate again, also within epochs.
            on_step: Called with the result of each step.
            on_epoch: Called with the result of each epoch, after its evaluation.
            on_evaluation: Called with the values of each evaluation, by name.
            options: Further arguments of `batches`. `evaluate` gets micro_batch_size, workers and collate_fn, too.

        Returns:
            The result of each epoch since the start of the run, also of those before a resume.

        Raises:
            RuntimeError: It is called inside a loss function or an evaluated function, or torch's process group failed.
            TypeError: loss_fn, a metric or a callback cannot be called, metrics is not a dict with names as keys, a
                dataset is neither map-style nor iterable, or an argument has the wrong type.
            ValueError: metrics or validate_every are given without validation, a number is out of range, or as
                described at `epochs`, `batches` and `step`.
            DataError: A dataset is empty, or as described at `batches`; for validation, before the first epoch.
            LossError, NonFiniteLossError, GroupError: As described at `step` and `evaluate`.
            RankMismatchError, PeerError, UnisonoError: As described at `step`.
            CheckpointError, KeyboardInterrupt, SystemExit: As described at `epochs`.
        """
        refuse_inside("trainer.fit")
        callbacks = Callbacks(on_step=on_step, on_epoch=on_epoch, on_evaluation=on_evaluation)
        check_fit(
            loss_fn,
            metrics,
            validation=validation,
            validate_every=validate_every,
            callbacks=callbacks,
            options=options,
            known=[*_keywords(self.fit), *_keywords(self.batches)],
        )
        size = next(iter(batch_size.values()), None) if isinstance(batch_size, Mapping) else batch_size
        if size is not None:
            size = whole("batch_size", size, least=1)
        shared: dict[str, Any] = {
            key: options[key] for key in ("micro_batch_size", "workers", "collate_fn") if key in options
        }
        evaluated = Validation(
            dataset=validation,
            functions=metrics or {"validation loss": loss_alone(loss_fn)},
            every_steps=None if validate_every is None else whole("validate_every", validate_every, least=1),
            options=shared,
        )
        left = self.epochs(epochs, max_steps=max_steps)
        if validation is not None:
            look = partial(
                self._test_loader, validation, batch_size=size or 32 * self._run.virtual_ranks, **shared
            )  # or an error, and not after an epoch
            self._recovery.call("trainer.fit", look, again=True)
        self._loop.optimizers.begin_training(None)
        return run_epochs(
            self,
            self._loop,
            epochs=left,
            loss_fn=loss_fn,
            make_batches=lambda: self.batches(dataset, batch_size=batch_size, **options),
            validation=evaluated,
            callbacks=callbacks,
        )


def _keywords(method: Callable[..., object]) -> list[str]:
    """Return the names of a method's arguments that are passed by keyword."""
    return [p.name for p in signature(method).parameters.values() if p.kind is p.KEYWORD_ONLY]
