"""The best checkpoint of a run by a metric, from an evaluation to the record on disk.

An evaluation belongs to the checkpoint of its step. If it is better than the best so far, it becomes the candidate,
which is recorded once a checkpoint of that step is on disk. Until then the previous one stays recorded, so it is never
pruned. Used on rank 0. Start reading at `BestCheckpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.best import Best, forget_best, read_best, write_best
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.policy import Checkpoints
from unisono.trainer.evaluation_history import EvaluationHistory, best_of, is_better

__all__ = ["BestCheckpoint"]


class BestCheckpoint:
    """Keeps the record of the best checkpoint of a run.

    Args:
        store: The checkpoints.
        policy: Names the metric that decides, if any.
        warn: Called with sentences for the user.
    """

    def __init__(self, store: CheckpointStore, policy: Checkpoints, warn: Callable[[str], None]) -> None:
        self._store, self._policy, self._warn = store, policy, warn
        self._recorded: Best | None = None
        self._in_flight: Best | None = None
        """A candidate whose checkpoint is being written."""
        self._candidate: Best | None = None
        """The best result so far, if it has no checkpoint yet, or the record does not name it yet."""
        self._on_disk: int | None = None
        """The step of the last checkpoint that this process has written or resumed from."""
        self._writing: int | None = None
        """The step of the checkpoint that is being written, or that could not be written."""
        self._replaced: int | None = None
        """The step at which other weights were loaded."""

    def begin(self, history: EvaluationHistory, *, step: int, resumed: bool) -> None:
        """Read the record of a run that continues at a step, and correct it from the history of evaluations.

        The history may hold a better evaluation than the record: if the process died before recording it, or if the
        record was lost or is of another metric.
        """
        self._on_disk = step if resumed else None
        folder, policy = self._store.folder, self._policy
        found: Best | None = None
        try:
            try:
                found = read_best(folder)
            except CorruptCheckpointError as error:
                self._warn(str(error))
                forget_best(folder)
            if found is None and policy.best is None:
                return
            steps = {info.step for info in self._store.list() if info.step <= step}
            if found is not None and found.step not in steps:  # deleted, or damaged so that the run went back
                found = None
                forget_best(folder)
            if policy.best is None or policy.mode is None:
                return
            if found is not None and (found.metric, found.mode) != (policy.best, policy.mode):
                found = None  # it stays on the disk until there is one of this metric
            known = best_of(history.of(policy.best), steps, mode=policy.mode)
            if known is not None and is_better(known.value, None if found is None else found.value, mode=policy.mode):
                found = Best(step=known.step, metric=policy.best, mode=policy.mode, value=known.value)
            if found is not None:
                self._record(found)  # also if it was found there: the link may be missing
        except CheckpointError as error:
            self._warn(str(error))

    def report(self, step: int, value: float) -> None:
        """Consider a result of an evaluation."""
        policy = self._policy
        if policy.best is None or policy.mode is None:
            return
        others = [each.value for each in (self._candidate, self._in_flight, self._recorded) if each is not None]
        if not math.isnan(value) and all(is_better(value, other, mode=policy.mode) for other in others):
            self._candidate = Best(step=step, metric=policy.best, mode=policy.mode, value=value)

    @property
    def has_candidate(self) -> bool:
        """True if the best result so far is not recorded yet."""
        return self._candidate is not None

    def needs_checkpoint(self, step: int) -> bool:
        """Return True if the best result so far is of this step, of which no checkpoint is written or being written."""
        return (
            self._candidate is not None and self._candidate.step == step and step not in (self._on_disk, self._writing)
        )

    def drop(self, why: str) -> None:
        """Discard the candidate, whose state was lost before it could be saved."""
        if self._candidate is not None:
            best, self._candidate = self._candidate, None
            self._warn(
                f"the state of step {best.step}, the best so far ({best.metric}={best.value:.6g}), is not kept: {why}"
            )

    def settle(self, error: object) -> None:
        """Handle the end of a write, with its error or None; record a candidate that is on disk."""
        if self._in_flight is not None and error is not None:
            self._candidate = self._candidate or self._in_flight
        self._in_flight = self._writing = None
        self.record_written()

    def record_written(self) -> None:
        """Record the candidate if its checkpoint is on disk. No write may be in progress."""
        if self._candidate is not None and self._candidate.step == self._on_disk:
            best, self._candidate = self._candidate, None
            try:
                self._record(best)
            except CheckpointError as failure:
                self._warn(str(failure))

    def writing(self, step: int) -> None:
        """Note that a checkpoint of a step is about to be written, by a thread or this one, and no other one is.

        Raises:
            CheckpointError: It replaces the best one, whose record cannot be removed.
        """
        self._in_flight, self._writing = None, step
        if self._recorded is not None and self._recorded.step == step == self._replaced:
            self._warn(f"the best checkpoint, of step {step}, is replaced: other weights were loaded at that step")
            forget_best(self._store.folder)
            self._recorded = None
        if self._candidate is not None:
            if self._candidate.step == step:
                self._in_flight, self._candidate = self._candidate, None
            else:
                self.drop("no checkpoint of it could be written")

    def written(self, step: int) -> None:
        """Note that this checkpoint is on disk, and record it if it is the best. Called before older ones are removed.

        Raises:
            CheckpointError: It cannot be recorded.
        """
        self._on_disk = step
        if self._in_flight is not None:
            self._record(self._in_flight)

    def weights_replaced(self, step: int) -> None:
        """Note that the weights at a step are no longer those that were evaluated or saved there."""
        self.drop("other weights were loaded before the loop asked for its next batch")
        self._on_disk, self._replaced = None, step

    def path(self) -> Path:
        """Return the folder of the best checkpoint.

        Raises:
            CheckpointError: There is none, or the record is damaged.
        """
        best = read_best(self._store.folder)
        if best is None:
            hint = "" if self._policy.best else ': Trainer needs checkpoints=Checkpoints(best="accuracy", mode="max")'
            raise CheckpointError(f"no checkpoint in {self._store.folder} is recorded as the best one{hint}")
        return self._store.step_path(best.step)

    def told_at_end(self, history: EvaluationHistory) -> str | None:
        """Return a warning if no evaluation has reported the metric; None otherwise."""
        metric = self._policy.best
        if metric is None:
            return None
        results = history.of(metric)
        if not results:
            names = ", ".join(map(repr, history.names())) or "nothing"
            return (
                f"Checkpoints(best={metric!r}) kept no best checkpoint: no evaluation reported {metric!r}. They "
                f"reported {names}. A metric has the name that evaluate was given, or the key of a dict."
            )
        if all(math.isnan(each.value) for each in results):
            return f"Checkpoints(best={metric!r}) kept no best checkpoint: {metric!r} was NaN in all evaluations."
        return None

    def _record(self, best: Best) -> None:
        write_best(self._store.folder, best)
        self._recorded = best
