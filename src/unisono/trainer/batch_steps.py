"""The steps on the batch that is in the loop: each one, and the work after it.

`step` runs a step, and `loop` deals the batches. Start reading at `BatchSteps.step`.
"""

from __future__ import annotations

import math

from unisono.data.batch import Batch
from unisono.errors import UnisonoError
from unisono.trainer.optimizer_steps import OptimizerSteps
from unisono.trainer.save_points import SavePoints
from unisono.trainer.step import Loss, StepOptions
from unisono.trainer.step_events import StepEvents
from unisono.trainer.step_result import StepResult
from unisono.trainer.table_statistics import TableStatistics
from unisono.trainer.trainer_parts import TrainerParts
from unisono.watch import EventLog

__all__ = ["BatchSteps"]


class BatchSteps:
    """Performs the steps of one run, each on the batch that its loop has.

    Args:
        parts: The parts of the run.
        optimizers: Its optimizers.
        log: Gets an event for each step.
        saves: Saves its state, which steps change.
    """

    def __init__(self, parts: TrainerParts, optimizers: OptimizerSteps, log: EventLog, saves: SavePoints) -> None:
        self._run, self._cursor, self._state, self._clock = parts.run, parts.cursor, parts.state, parts.run.clock
        self._carried, self._carries = parts.carried, bool(parts.carried)
        self._optimizers, self._log, self._saves = optimizers, log, saves
        self._events = StepEvents(log, parts.run.device)
        self._table_statistics = TableStatistics(parts.modules, log)
        self.batch: Batch | None = None
        """The batch in the loop. The loop sets it."""
        self.calls = 0
        """The number of steps done with it."""
        self.versions: list[int] = []
        """Versions of the tensors in the batch when it was dealt."""

    @property
    def moment(self) -> tuple[int, int, int]:
        """Epoch, step, and steps done with its batch, or -1 before it is in the loop: where random numbers belong."""
        batch = self.batch
        return (self._cursor.epoch, self._cursor.step, -1) if batch is None else (batch.epoch, batch.step, self.calls)

    @property
    def mean_loss(self) -> float:
        """Mean loss over the samples of the current epoch so far; NaN before its first step."""
        cursor = self._cursor
        return cursor.loss_sum / cursor.loss_weight if cursor.loss_weight else math.nan

    def begin(self) -> None:
        """Begin to measure the time of the next step."""
        self._events.begin()

    def step(self, loss_fn: Loss, batch: Batch, optimizer: str | None, options: StepOptions) -> StepResult:
        """Perform one step on the latest batch, and the work after it; see `Trainer.step`."""
        if batch is not self.batch:
            raise ValueError("step takes the batch that trainer.batches gave last, once it is in your loop")
        name = self._optimizers.name(optimizer)
        runner = self._optimizers.runners[name]
        self._saves.save_evaluated()
        self._saves.announce(self.calls)
        clock = self._clock
        if clock.is_measuring or clock.is_due:
            clock.begin(self._cursor.total_steps)
        self._table_statistics.begin(loss_fn)
        self._state.begin()
        try:
            if self._carries:
                with self._carried.transaction():
                    result = runner.run(loss_fn, batch, call=self.calls, options=options)
            else:
                result = runner.run(loss_fn, batch, call=self.calls, options=options)
            if not result.skipped:
                self._optimizers.update_averages(name)
            self._state.commit(runner.transaction)
        except BaseException as error:
            self._table_statistics.give_up()
            self._state.give_up()
            if isinstance(error, UnisonoError):
                # A signal to all ranks has ended the others, too: this rank's signal explains more than their end.
                self._saves.raise_pending()
            raise
        if not result.skipped:
            self._optimizers.update_schedules(name)
        self._count_step(batch)
        runner.transaction.close()
        self._count_loss(batch, result)
        clock.end(self._cursor.total_steps)
        self._table_statistics.end(self._cursor.total_steps)
        shown = name if len(self._optimizers.runners) > 1 else None
        self._events.emit(batch, result, total_steps=self._cursor.total_steps, weight=runner.weight, optimizer=shown)
        for message in (*runner.warnings(batch.epoch), self._optimizers.warning()):
            if message is not None:
                self._log.emit("warning", message=message)
        return result

    def account(self, batch: Batch, result: StepResult) -> None:
        """Account for a step on the latest batch that other ranks have made."""
        self._count_step(batch)
        self._count_loss(batch, result)
        self._run.set_generators("loop", batch.epoch, batch.step, self.calls)

    def _count_step(self, batch: Batch) -> None:
        cursor = self._cursor
        if not self.calls:
            cursor.step, cursor.total_steps = batch.step + 1, cursor.total_steps + 1
        self.calls += 1
        self._saves.note_step()

    def _count_loss(self, batch: Batch, result: StepResult) -> None:
        cursor = self._cursor
        cursor.loss_sum, cursor.loss_weight = cursor.loss_sum + result * batch.size, cursor.loss_weight + batch.size
