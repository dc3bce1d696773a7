"""The state of a run at the moment when the loop last asked for a batch or an epoch, as long as it still exists.

It is complete at that moment: the work of the loop's body until it asks again takes effect completely or not at all.
This is therefore the state to save when the loop is left by break or by an error, and when the process ends. Small
parts are noted; the rest, such as weights, must not have changed since. Start reading at `AskedState.note` and
`why_lost`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from unisono.errors import CheckpointError
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.trainer.best_checkpoint import BestCheckpoint
from unisono.trainer.carried import Carried
from unisono.trainer.hyperparameters import Hyperparameters, SettingsReader, is_scheduler
from unisono.trainer.save_rule import Place
from unisono.trainer.snapshot import capture, facts_of
from unisono.trainer.trainer_parts import TrainerParts
from unisono.watch import EventLog

__all__ = ["AskedState"]

_version_of = attrgetter("_version")


class _Noted(NamedTuple):
    """The parts of a state that are cheap to note."""

    place: Place
    settings: Hyperparameters
    writes: int
    """Number of writes to parameters until then."""
    evaluations: int
    """Number of results of evaluations until then."""


class AskedState:
    """The state of a run when its loop last asked, on the rank that saves; on others nothing is noted.

    Args:
        parts: The parts of the run.
        log: Gets warnings.
    """

    def __init__(self, parts: TrainerParts, log: EventLog) -> None:
        self._run, self._cursor, self._keeper, self._history = parts.run, parts.cursor, parts.keeper, parts.history
        self._subjects, self._runners, self._log = parts.subjects, parts.runners, log
        self._writes = parts.keeper.writes
        self._settings = SettingsReader(parts.subjects.optimizers, parts.subjects.others)
        self._parameters = [p for module in parts.modules.values() for p in module.parameters()]
        self._gathering, self._cut = parts.gathering, parts.cut
        self.unknown = [
            name.removeprefix("stateful/")
            for name, each in parts.subjects.others.items()
            if name.startswith("stateful/") and not isinstance(each, Carried) and not is_scheduler(each)
        ]
        """Objects whose state may change at any time and is too large to be noted at each batch."""
        self.has_stepped = False
        """True if a step was done since the loop last asked for a batch or an epoch."""
        self.is_leaving = False
        """True while the state is saved because the loop was left."""
        self._noted: _Noted | None = None

    def note(self) -> None:
        """Note the present state. About 3 µs, and 30 ns for each parameter."""
        if self._writes:
            settings = self._settings.read()
            writes = sum(map(_version_of, self._parameters))
            self._noted = _Noted(self._cursor.place, settings, writes, len(self._history))
        self.has_stepped = False  # only once the note exists: a signal may come between any two of these lines

    @property
    def is_writing(self) -> bool:
        """True while a step writes weights."""
        return any(runner.transaction.writing for runner in self._runners.values())

    def capture(
        self, noted: _Noted | None = None, optimizers: Mapping[str, dict[str, dict[str, Any]]] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Describe the run as it is, or as it was when it was noted, if no step was done since then.

        Args:
            noted: What was noted. None: the run as it is.
            optimizers: See `snapshot.capture`.
        """
        constants = {"seed": self._run.seed, "virtual_ranks": self._run.virtual_ranks}
        cursor, settings, evaluations = self._cursor, None, len(self._history)
        if noted is not None:
            (epoch, step, total_steps), settings, evaluations = noted.place, noted.settings, noted.evaluations
            cursor = replace(cursor, epoch=epoch, step=step, total_steps=total_steps)
        facts = {**facts_of(constants, cursor), "evaluations": self._history.state(evaluations)}
        if isinstance(self._cut, CutModel) and (stages := self._cut.stages_document()) is not None:
            facts["stages"] = stages
        return capture(self._subjects, facts, settings, optimizers)

    def why_lost(self) -> str | None:
        """Return why the noted state no longer exists; None if it does."""
        if self.is_writing:
            return "the process ended while weights were written"
        if self._gathering is not None and not self._gathering.is_whole:
            return "each rank has a part of the model, and it cannot be brought together any more"
        if self.has_stepped:
            return "the loop was left after a step, before it asked for the next batch"
        if self.unknown:
            return f"it is not known whether the loop has changed {', '.join(self.unknown)} since it asked last"
        if self._noted is None or sum(map(_version_of, self._parameters)) != self._noted.writes:
            return "weights were changed by other code than trainer.step"
        return None

    def save_evaluated(self, best: BestCheckpoint) -> None:
        """Save the state that an evaluation found to be the best one, before a step changes it."""
        if best.needs_checkpoint(self._cursor.total_steps):
            why, noted = self.why_lost(), self._noted
            if self.has_stepped:
                why = "it was evaluated between two steps of one batch"
            if why is None and noted is not None:
                self._keeper.submit(noted.place, partial(self.capture, noted))
            else:
                best.drop(f"{why}. Evaluate as the last thing in the body of the loop")

    def save_left(self) -> None:
        """Save the state in the background, if it still exists, after the loop has ended by break or an error.

        It runs where an exception cannot propagate, so failures are warnings, and a signal waits.
        """
        noted, self.is_leaving = self._noted, True
        try:
            if noted is not None and self.why_lost() is None and self._keeper.is_newer(noted.place):
                self._keeper.submit(noted.place, partial(self.capture, noted))
        except CheckpointError as error:
            self._log.emit("warning", message=f"checkpoint not written: {error}")
        finally:
            self.is_leaving = False

    def rescue(self) -> None:
        """Save the state at the end of the process or of its Trainer; if it is lost, emit a warning. Both only once."""
        noted = self._noted
        if noted is None:
            return
        self._keeper.settle()
        if not self._keeper.is_newer(self._cursor.place if self.has_stepped else noted.place):
            return
        why, self._noted = self.why_lost(), None
        if why is None:
            self._keeper.rescue(noted.place, partial(self.capture, noted))
            return
        last = self._keeper.last_step
        self._log.emit(
            "warning",
            message=f"steps after {last} were not saved: {why}. The next start goes on after step {last}; "
            "checkpoints=Checkpoints(every_steps=...) loses less, and trainer.save() saves before a break.",
        )
