"""The order of things in a run: epochs, batches and steps, what follows a step, and when the state may be saved.

One step is `step`'s affair, what a checkpoint holds `snapshot`'s, and how it comes to the disk `keeping`'s. What users
call, and what their arguments mean, stands in `trainer`.
"""

from __future__ import annotations

import atexit
import math
import time
import weakref
from collections.abc import Iterator
from typing import Any, Literal

import torch

from unisono.data.batch import Batch
from unisono.data.mapped import Loader
from unisono.data.stream import StreamLoader
from unisono.errors import UnisonoError
from unisono.machine import resident_bytes
from unisono.trainer.assembly import Parts
from unisono.trainer.ending import Terminator
from unisono.trainer.snapshot import capture, facts_of
from unisono.trainer.step import Loss, StepRunner
from unisono.watch import EventLog
from unisono.watch.events import StepFields

__all__ = ["Loop"]

_MEASURE_S = 1.0
"""How often memory is looked at."""


class Loop:
    """Takes one run from where its cursor stands to its end.

    Args: scheduler_interval is what learning-rate schedulers are stepped after. keeps is whether the run has a
        directory: then it is saved, also when the process is ended from outside.
    """

    def __init__(
        self, parts: Parts, log: EventLog, *, scheduler_interval: Literal["step", "epoch"], keeps: bool
    ) -> None:
        self._run, self._keeper, self._cursor = parts.run, parts.keeper, parts.cursor
        self._modules, self._subjects, self._averages = parts.modules, parts.subjects, parts.averages
        self._runners, self._schedulers = parts.runners, parts.schedulers
        self._log, self._scheduler_interval = log, scheduler_interval
        self._batch: Batch | None = None
        self._calls = 0
        self._epochs: int | None = None
        self._last_step: int | None = None
        self._loss_sum = self._loss_weight = 0.0
        self._started_s = self._step_ended_s = time.monotonic()
        self._measured_s = -math.inf
        self._keeper.begin(log, total_steps=self._cursor.total_steps)
        if keeps and self._run.world.rank == 0:
            atexit.register(_rescue, weakref.ref(self))
        self._terminator = Terminator.install(self._is_writing) if keeps else None

    @property
    def mean_loss(self) -> float:
        """Mean loss over the samples of the epoch that `batches` was asked for last; NaN before the first step."""
        return self._loss_sum / self._loss_weight if self._loss_weight else float("nan")

    def epochs(self, epochs: int, steps: int | None) -> Iterator[int]:
        """Yield the epochs that are left, as `Trainer.epochs` says."""
        self._epochs, self._last_step = epochs, steps
        self._started_s = time.monotonic()
        cursor = self._cursor
        while cursor.epoch < epochs and not self._is_over():
            yield cursor.epoch
            if self._is_over():
                break  # Where exactly it stopped, in mid-epoch or at its end, is for the next start to see.
            cursor.epoch, cursor.step = cursor.epoch + 1, 0
            if self._scheduler_interval == "epoch":
                for scheduler in self._schedulers.values():
                    scheduler.step()
            self._keeper.save_if_due(cursor.total_steps, self._capture, epoch_ended=True)
        self._epochs = self._last_step = None
        self._keeper.finish(cursor.total_steps, self._capture)
        self._log.emit("end", total_steps=cursor.total_steps, seconds=round(time.monotonic() - self._started_s, 3))

    def batches(self, loader: Loader | StreamLoader, *, batch_size: int) -> Iterator[Batch]:
        """Yield the batches that are left of the current epoch.

        Raises: ValueError, at once, if the epoch was begun with other numbers of samples.
        """
        cursor = self._cursor
        now, before = (batch_size, loader.num_samples), (cursor.batch_size, cursor.num_samples)
        if cursor.step and now != before:
            raise ValueError(
                f"the run stopped in epoch {cursor.epoch} before step {cursor.step}, with batch_size={before[0]} and "
                f"{before[1]} samples; the epoch cannot go on with batch_size={now[0]} and {now[1]} samples, or "
                "samples would be missed or seen twice. Give the same as before until the epoch ends."
            )
        cursor.batch_size, cursor.num_samples = now
        return self._batches_left(loader)

    def _batches_left(self, loader: Loader | StreamLoader) -> Iterator[Batch]:
        cursor = self._cursor
        within_epochs = self._epochs is not None
        self._loss_sum = self._loss_weight = 0.0
        self._log.emit(
            "epoch",
            epoch=cursor.epoch,
            epochs=self._epochs,
            steps=loader.steps,
            first_step=cursor.step,
            num_samples=loader.num_samples,
            total_steps=cursor.total_steps,
            run_steps=self._run_steps(loader.steps),
        )
        self._step_ended_s = time.monotonic()
        for batch in loader.batches(epoch=cursor.epoch, first_step=cursor.step):
            if self._is_over():
                return
            self._batch, self._calls = batch, 0
            self._run.set_generators("loop", batch.epoch, batch.step, 0)
            yield batch
            if self._calls:
                self._keeper.save_if_due(cursor.total_steps, self._capture)
        self._batch = None
        if not within_epochs:
            cursor.epoch, cursor.step = cursor.epoch + 1, 0

    def step(self, loss: Loss, batch: Batch, optimizer: str | None) -> float:
        """Take one step on the batch given last, and what follows it; see `Trainer.step`."""
        if batch is not self._batch:
            raise ValueError("step takes the batch that trainer.batches gave last, once it is in your loop")
        name = self._name(optimizer)
        runner = self._runners[name]
        try:
            mean = runner.run(loss, batch, call=self._calls)
        except UnisonoError:
            # Where SIGTERM goes to all ranks, the end of the others is no news to one that waited for them.
            if self._terminator is not None:
                self._terminator.check()
            raise
        learning_rate = runner.learning_rate
        if not runner.skipped:
            for prefix, average in self._averages.items():
                if runner.trains(self._modules[prefix]):
                    average.update_parameters(self._modules[prefix])
            if self._scheduler_interval == "step" and (scheduler := self._schedulers.get(name)) is not None:
                scheduler.step()
        cursor = self._cursor
        if not self._calls:
            cursor.step, cursor.total_steps = batch.step + 1, cursor.total_steps + 1
        self._calls += 1
        runner.updating = False
        runner.raise_deferred()
        if self._terminator is not None:
            self._terminator.check()
        self._loss_sum, self._loss_weight = self._loss_sum + mean * batch.size, self._loss_weight + batch.size
        self._tell(runner, batch, name, loss=mean, lr=learning_rate)
        return mean

    def save(self) -> None:
        """Save a checkpoint now, in the background."""
        self._keeper.save(self._cursor.total_steps, self._capture)

    def _name(self, optimizer: str | None) -> str:
        """Say which optimizer is meant; one that is alone need not be named."""
        if optimizer is None and len(self._runners) == 1:
            return next(iter(self._runners))
        if optimizer is None or optimizer not in self._runners:
            names = ", ".join(map(repr, self._runners))
            raise ValueError(f"optimizer={optimizer!r}, but Trainer was given several: name one of {names}")
        return optimizer

    def _run_steps(self, steps: int | None) -> int | None:
        """Return how many steps the run will have had at its end, if its epochs have so many."""
        cursor, epochs, last = self._cursor, self._epochs, self._last_step
        if epochs is None or steps is None:
            return last
        whole = cursor.total_steps - cursor.step + (epochs - cursor.epoch) * steps
        return whole if last is None else min(whole, last)

    def _tell(self, runner: StepRunner, batch: Batch, name: str, *, loss: float, lr: float) -> None:
        """Emit the event of a step."""
        now = time.monotonic()
        fields: StepFields = {
            "epoch": batch.epoch,
            "step": batch.step,
            "total_steps": self._cursor.total_steps,
            "loss": loss,
            "samples": batch.size,
            "lr": lr,
            "step_s": round(now - self._step_ended_s, 6),
        }
        if runner.weight != batch.size:
            fields["weight"] = runner.weight
        if runner.grad_norm is not None:
            fields["grad_norm"] = runner.grad_norm
        if len(self._runners) > 1:
            fields["optimizer"] = name
        if now - self._measured_s >= _MEASURE_S and (memory := _memory_in_use(self._run.device)) is not None:
            self._measured_s = now
            fields["memory"] = memory
        self._log.emit("step", **fields)
        self._step_ended_s = now

    def _is_over(self) -> bool:
        return self._last_step is not None and self._cursor.total_steps >= self._last_step

    def _capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        constants = {"seed": self._run.seed, "virtual_ranks": self._run.virtual_ranks}
        return capture(self._subjects, facts_of(constants, self._cursor))

    def _is_writing(self) -> bool:
        return any(runner.updating for runner in self._runners.values())

    def _rescue(self) -> None:
        # In the middle of an update, or between the steps of several optimizers, the state is of no step.
        if self._is_writing() or self._calls not in (0, len(self._runners)):
            return
        self._keeper.rescue(self._cursor.total_steps, self._capture)


def _memory_in_use(device: torch.device) -> int | None:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_bytes()


def _rescue(reference: weakref.ref[Loop]) -> None:
    """Save the last step that was done when the process ends by Ctrl-C, SIGTERM or an error."""
    loop = reference()
    if loop is not None:
        loop._rescue()
