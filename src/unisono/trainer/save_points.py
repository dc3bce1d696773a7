"""The points of a run at which its state is complete, and what is saved there.

The state is complete when the user's loop asks for the next batch or epoch: by then the loop has done its work for this
step, such as updating a teacher model, and does not repeat it. So the state is saved at that point, and a save at the
end of the process writes that state, if it is still there (`asked_state`). `checkpointing` decides when and where it is
written. Start reading at `SavePoints.ask`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from unisono.engine.step_fingerprint import intent_of_call
from unisono.trainer.asked_state import AskedState
from unisono.trainer.drilled import tell_end
from unisono.trainer.rescue import Rescue
from unisono.trainer.save_rule import Place
from unisono.trainer.stop_signals import StopSignals, ignore_at_end
from unisono.trainer.trainer_parts import Gathering, TrainerParts
from unisono.watch import EventLog

__all__ = ["SavePoints"]


_SAVING = "a save of trainer.batches"
"""The call in which ranks write their parts of a checkpoint together, if single ones of them can be replaced."""


class SavePoints:
    """Saves the state of one run where it is complete, and lets signals end the run there.

    Args:
        parts: The parts of the run.
        log: Gets its events.
        keeps: True if the run has a directory.
    """

    def __init__(self, parts: TrainerParts, log: EventLog, *, keeps: bool) -> None:
        self._parts, self._recovery, self._log = parts, parts.recovery, log
        self._keeper, self._cursor, self._history = parts.keeper, parts.cursor, parts.history
        self._carried, self._keeps = parts.carried, keeps
        self._keeps_carried = keeps and bool(parts.carried)
        self._gathering = parts.gathering
        self.is_asking = False
        """True from when the loop asks for a batch or an epoch until it gets one."""
        self._has_evaluated = False
        """True if there was an evaluation since the loop last asked."""
        self._kept: Place | None = None
        """The place whose carried values rank 0 has."""
        position = self._recovery.position
        resumed = parts.source is not None or position is not None
        self._keeper.begin(log, self._cursor.place, self._history, resumed=resumed)
        self._best = self._keeper.best
        self._asked = AskedState(parts, log)
        if position is None:
            self._asked.note()
        else:
            self._keeper.take_over(position.saved)
        self._rescue: Rescue | None = None
        ignore_at_end()
        if self._keeper.writes:
            self._keeper.on_taken(self._asked.rescue)
            self._rescue = Rescue(self._asked)
            self._rescue.watch(self)
        self._stops: StopSignals | None = None

    def tell_drill(self) -> None:
        """Tell the state at the end of the run, if that is one of `unisono drill`."""
        parts, folder = self._parts, self._parts.settings.drill
        if folder is not None and self._recovery.is_joined:
            self._gather(everywhere=True)
            tell_end(folder, parts.subjects, rank=parts.run.world.rank, total_steps=self._cursor.total_steps)

    def heed_signals(self, can_stop: Callable[[], bool]) -> None:
        """End the run on SIGTERM and Ctrl-C from now on, where its state can be saved.

        Args:
            can_stop: A bound method that returns True while a signal may end the run at once. It may be called at any
                time from now on. Its object is not kept alive.
        """
        self._stops = StopSignals.install(can_stop, self._tell_put_off)

    def hold(self, call: str) -> None:
        """Take the directory of the run, before a loop begins. Every rank must call it.

        Args:
            call: The name of the user's call, for the recovery of a rank.
        """
        self._call(call, self._keeper.hold_on_all, again=True)
        if self._rescue is not None:
            self._rescue.watch(self)

    def ask(self, *, epoch_ended: bool = False, finishing: bool = False) -> None:
        """Note that the loop asks for its next batch or epoch, so that its state is complete; save and stop if due."""
        if not self._keeps:
            self.is_asking = True
            return
        if self._keeps_carried:
            self._keep_carried()
        due = None
        if self._gathering is not None and not finishing:
            due = self._gather_if_due(self._gathering, epoch_ended=epoch_ended)
        self._asked.note()
        if not finishing:
            self._keeper.save_if_due(self._cursor.place, self._asked.capture, epoch_ended=epoch_ended, due=due)
        self.is_asking = True
        if not finishing and self._stops is not None and self._stops.is_due(is_main=self._parts.run.world.rank == 0):
            if self._parts.run.world.rank == 0 and not self.is_whole and self._keeper.is_newer(self._cursor.place):
                return  # the signal came after the others were told that there is nothing to save
            self.save_if_whole()
            self._stops.raise_pending()

    def save(self, tag: str | None = None) -> None:
        """Save a checkpoint now, in the background or, with a tag, until it is on disk; see `Trainer.save`."""
        if self._keeps_carried:
            self._keep_carried()
        if self._keeps:
            if self._save_parts(tag):
                if tag is None:
                    self._asked.note()
                return
            self._gather(everywhere=False)
        if tag is not None:
            self._keeper.save_tag(tag, self._cursor.place, self._asked.capture)
            return
        self._keeper.save(self._cursor.place, self._asked.capture, on_all=True)
        self._asked.note()

    def announce(self, calls: int) -> None:
        """Let all ranks know in a step whether a checkpoint is due after it, if others than rank 0 must know.

        Args:
            calls: The number of steps done with this batch.
        """
        if self._gathering is not None or self._keeper.hosts.are_shared:
            stops = self._gathering is not None and self._stops is not None and self._stops.is_pending
            self._keeper.announce(self._cursor.total_steps + (not calls), is_wanted=stops)

    def save_if_whole(self) -> None:
        """Save a state newer than the last checkpoint, while the loop waits for its next batch or epoch."""
        if self.is_asking and self._keeper.is_newer(self._cursor.place) and self.is_whole:
            self._keeper.save(self._cursor.place, self._asked.capture)

    def save_evaluated(self) -> None:
        """Save the state that an evaluation found to be the best one, before a step changes it."""
        if self._best is not None and self._best.has_candidate:
            self._asked.save_evaluated(self._best)

    def save_left(self) -> None:
        """Save the state from when the loop asked last, after it was left by break or an error."""
        self._asked.save_left()

    def finish(self, *, in_mid_epoch: bool) -> None:
        """Save the end of a run, and wait until it is on disk. Every rank must call it.

        Args:
            in_mid_epoch: True if the run ends before its epoch does: a failed write is then not tried again.

        Raises:
            CheckpointError, BaseException: See `Checkpointing.finish`.
        """
        if self._keeps_carried:
            self._keep_carried()
        self._save_last_parts()
        if not self._stays_divided:
            self._gather(everywhere=True)
        self.is_asking = True
        self._recovery.leave_epochs()
        retry = not in_mid_epoch and self.is_whole
        finish = partial(self._keeper.finish, self._cursor.place, self._asked.capture, retry=retry)
        self._call("the end of trainer.epochs", finish)

    def release(self) -> None:
        """Stop watching for the end of the process, once everything is saved; warn if no best checkpoint was found."""
        if self._rescue is not None:
            self._rescue.release()
        if self._best is not None and (message := self._best.told_at_end(self._history)) is not None:
            self._warn(message)

    def note_evaluation(self, name: str, values: Mapping[str, float]) -> None:
        """Add the results of an evaluation to the history, and see whether the best checkpoint is due.

        Raises:
            ValueError: On all ranks, if several evaluations have a metric of the name that decides.
        """
        self._has_evaluated = True
        self._keeper.report(self._history, self._history.add(name, values, step=self._cursor.total_steps))

    def note_step(self) -> None:
        """Note that a step was done: the state from when the loop asked last is gone."""
        self._asked.has_stepped = True

    def note_state(self) -> None:
        """Note that the present state is the one from when the loop asked last."""
        self._asked.note()

    def can_stop(self, *, is_looping: bool) -> bool:
        """Return True if the run may end here without losing a state that a later end could save.

        Args:
            is_looping: True while a loop over epochs or batches is under way.
        """
        needs_others = self._gathering is not None and self._gathering.needs_others
        if self._asked.is_writing or self._asked.is_leaving or (is_looping and (needs_others or not self.is_whole)):
            return False
        return self.is_asking or not is_looping or not (self._asked.has_stepped or self._asked.unknown)

    def raise_pending(self) -> None:
        """Raise the exception of a signal that was put off."""
        if self._stops is not None:
            self._stops.raise_pending()

    def end_loop(self) -> None:
        """Raise the exception of a signal that was put off until the loop has ended.

        If this rank alone was asked to end, its work is done now: it ends as its program does, or in its next loop.
        """
        if self._stops is not None:
            self._stops.raise_pending(also_terminated=not self._recovery.decisions.is_asked_alone)

    def _call(self, name: str, body: Callable[[], None], *, again: bool = False) -> None:
        """Make a call that needs the other ranks only if there is a directory: otherwise it is none for the recovery.

        Ranks are then never more than one call apart.
        """
        if self._keeper.store is None:
            body()
        else:
            self._recovery.call(name, body, again=again)

    def _keep_carried(self) -> None:
        """Bring the values that virtual ranks carry to rank 0, once for each place of a run that is saved."""
        cursor = self._cursor
        if cursor.place == self._kept:
            return
        self._parts.compare(
            intent_of_call("trainer.batches()", epoch=cursor.epoch, step=cursor.step, total_steps=cursor.total_steps)
        )
        self._carried.keep()
        self._kept = cursor.place

    def gather(self) -> None:
        """Bring the parts of a model together on all ranks, unless it was built in parts. Every rank must call it."""
        if not self._stays_divided:
            self._gather(everywhere=True)

    @property
    def _stays_divided(self) -> bool:
        return self._gathering is not None and self._gathering.stays_divided

    @property
    def is_whole(self) -> bool:
        """True if this rank has the present state of all ranks."""
        return self._gathering is None or self._gathering.is_whole

    def _gather(self, *, everywhere: bool) -> None:
        if self._gathering is not None:
            self._gathering.gather(everywhere=everywhere)

    def _gather_if_due(self, gathering: Gathering, *, epoch_ended: bool) -> bool:
        """Let ranks write their parts of a model that is cut, if that is due, or bring them to rank 0, which saves.

        After a step, ranks know from it whether it is due. Otherwise rank 0 may have to tell the others.

        Returns:
            True if it is due; on other ranks than 0 only if they need to know.
        """
        world, place = self._parts.run.world, self._cursor.place
        needs_others = gathering.needs_others
        all_know = needs_others and self._asked.has_stepped and not epoch_ended and not self._has_evaluated
        self._has_evaluated = False
        if all_know:
            due = self._keeper.announcement.is_agreed
            if not due:
                return False
        else:
            due = world.rank == 0 and (
                self._keeper.is_due(place, epoch_ended=epoch_ended)
                or (self._stops is not None and self._stops.is_pending and self._keeper.is_newer(place))
            )
        if gathering.is_replaceable:
            return self._recovery.call(_SAVING, partial(self._agree_and_save, own=due))
        if needs_others and not all_know:
            due = self._agrees(own=due)
        if due and not self._save_parts():
            self._gather(everywhere=False)
        return due

    def _agrees(self, *, own: bool) -> bool:
        """Return True on all ranks if a checkpoint is due on one."""
        return any(is_due for (is_due,) in self._parts.run.world.gather_numbers([own]))

    def _agree_and_save(self, *, own: bool) -> bool:
        """Save a checkpoint in parts if it is due on one rank; return on all ranks whether it was. See `join_save`."""
        due = self._agrees(own=own)
        if due:
            self._save_parts()
        return due

    def join_save(self) -> None:
        """Take part in a save before the next batch, on a new rank whose others have made it or are in it."""
        if self._recovery.next_call == _SAVING:
            self._recovery.call(_SAVING, partial(self._agree_and_save, own=False))

    def _save_last_parts(self) -> None:
        """Let each rank write its part of the end of a run, if that is not on the disk, before parts come together."""
        gathering = self._gathering
        if not self._keeps or gathering is None:
            return
        if gathering.stays_divided:
            gathering.divide_again()
        if not gathering.is_divided:
            return

        def is_due() -> bytes:
            self._keeper.settle()
            return b"1" if self._keeper.is_wanted_at_end(self._cursor.place) else b"0"

        def save() -> None:
            if self._parts.run.world.broadcast_bytes(is_due) == b"1" and not self._save_parts() and self._stays_divided:
                self._gather(everywhere=False)

        if gathering.is_replaceable:
            self._recovery.call("the last save of trainer.epochs", save)
        else:
            save()

    def _save_parts(self, tag: str | None = None) -> bool:
        """Let each rank write its part, if the run is divided and they can; otherwise return False on all ranks."""
        gathering = self._gathering
        if gathering is None or not gathering.is_divided:
            return False
        return self._keeper.save_parts(
            self._cursor.place, lambda optimizers: self._asked.capture(None, optimizers), gathering.saving, tag=tag
        )

    def _tell_put_off(self, sentence: str) -> None:
        """Tell that a signal is put off, unless the launcher sent it since a rank has failed: it tells that itself."""
        if not self._recovery.decisions.has_failed:
            self._warn(sentence)

    def _warn(self, sentence: str) -> None:
        self._log.emit("warning", message=sentence)
