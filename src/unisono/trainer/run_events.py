"""The events of a whole run: that an epoch begins, that there is nothing left to do, and that a loop has ended.

`step_events` has those of its steps.
"""

from __future__ import annotations

import time

from unisono.trainer.divided_tables import DividedTables
from unisono.trainer.state_digests import digest_at_end
from unisono.trainer.trainer_parts import TrainerParts
from unisono.watch import EventLog
from unisono.watch.event_kinds import EndFields

__all__ = ["RunEvents"]


class RunEvents:
    """Emits the events of a run between its steps.

    Args:
        parts: The parts of the run.
        log: Gets the events.
        keeps: True if the run has a directory: then the last event has a digest of a state that is not large.
    """

    def __init__(self, parts: TrainerParts, log: EventLog, *, keeps: bool) -> None:
        self._log, self._cursor = log, parts.cursor
        is_here = not isinstance(parts.gathering, DividedTables)
        self._digested = (parts.modules, parts.subjects.optimizers) if keeps and is_here else None
        self._started_s = time.monotonic()

    def begin(self) -> None:
        """Begin to measure the time of a loop over epochs."""
        self._started_s = time.monotonic()

    def tell_epoch(
        self, *, steps: int | None, num_samples: int | None, epochs: int | None, last_step: int | None
    ) -> None:
        """Tell that the batches of an epoch begin.

        Args:
            steps: The number of steps of an epoch, if it is known.
            num_samples: The number of samples of an epoch, if it is known.
            epochs: The number of epochs of the run; None if there is no loop over epochs.
            last_step: The step after which the run ends; None: that of its last epoch.
        """
        cursor = self._cursor
        run_steps = last_step
        if epochs is not None and steps is not None:
            whole = cursor.total_steps - cursor.step + (epochs - cursor.epoch) * steps
            run_steps = whole if last_step is None else min(whole, last_step)
        self._log.emit(
            "epoch",
            epoch=cursor.epoch,
            epochs=epochs,
            steps=steps,
            first_step=cursor.step,
            num_samples=num_samples,
            total_steps=cursor.total_steps,
            run_steps=run_steps,
        )

    def tell_over(self, epochs: int, max_steps: int | None, *, first_step: int) -> None:
        """Tell that there is nothing to do.

        Args:
            epochs: The number of epochs that has been asked for.
            max_steps: The number of steps that has been asked for, if there is one.
            first_step: The number of steps done when the first processes of the job began.

        Raises:
            ValueError: This Trainer has done some of the steps.
        """
        cursor = self._cursor
        asked = f"epochs={epochs}" if max_steps is None else f"epochs={epochs}, max_steps={max_steps}"
        if cursor.total_steps > first_step:
            raise ValueError(
                f"{asked} is done: this Trainer is at epoch {cursor.epoch}, after {cursor.total_steps} steps. Epochs "
                "and steps count from the start of the run: to do as much again, ask for "
                f"epochs={cursor.epoch + epochs}."
            )
        self._log.emit("over", epoch=cursor.epoch, total_steps=cursor.total_steps, epochs=epochs, max_steps=max_steps)

    def tell_end(self, *, is_whole: bool) -> None:
        """Tell that a loop over epochs has ended; with a digest of the state, if the run is whole."""
        if not self._log.hears("end"):
            return
        fields: EndFields = {
            "total_steps": self._cursor.total_steps,
            "seconds": round(time.monotonic() - self._started_s, 3),
        }
        if self._digested is not None and is_whole and (digest := digest_at_end(*self._digested)) is not None:
            fields["digest"] = digest
        self._log.emit("end", **fields)
