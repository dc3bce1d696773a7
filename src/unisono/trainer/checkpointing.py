"""Writes the checkpoints of a run when they are due, and at its end.

Only rank 0 uses the directory of the run (`run_directory`, `checkpoint_writer`), so the ranks need no shared file
system. If they have one, the ranks of a divided run write their parts there (`part_checkpoints`), and so do hosts that
have the whole state each (`host_parts`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from unisono.collectives.rank_errors import raised_on_all
from unisono.collectives.world import World
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.policy import Checkpoints
from unisono.trainer.best_checkpoint import BestCheckpoint
from unisono.trainer.checkpoint_events import CheckpointEvents
from unisono.trainer.checkpoint_writer import CheckpointWriter
from unisono.trainer.evaluation_history import Evaluated, EvaluationHistory
from unisono.trainer.host_parts import HostParts, Occasion, Snapshot
from unisono.trainer.part_checkpoints import PartCheckpoints
from unisono.trainer.resume import Resume, ResumedRun, find
from unisono.trainer.run_directory import RunDirectory
from unisono.trainer.save_announcement import SaveAnnouncement
from unisono.trainer.save_rule import Place, SaveRule
from unisono.watch import EventLog

__all__ = ["Checkpointing"]


class Checkpointing(PartCheckpoints):
    """Reads and writes the checkpoints of one run. Without a directory it does nothing.

    Args:
        directory: The directory.
        policy: When to save.
        world: The ranks.
        apart: By group and name, tensors in files, which are too large to be copied: checkpoints are read into them,
            and ranks wait while they are written.
        loses_ranks: See `HostParts`.
    """

    def __init__(
        self,
        directory: Path | None,
        policy: Checkpoints,
        world: World,
        apart: Mapping[tuple[str, str], Tensor] | None = None,
        *,
        loses_ranks: Callable[[], bool] = lambda: False,
    ) -> None:
        self._policy, self._world, self._apart = policy, world, apart or {}
        self._rule = SaveRule(policy)
        self._directory = None if directory is None else RunDirectory(directory, incremental=bool(policy.incremental))
        self._writer: CheckpointWriter | None = None
        self._events = CheckpointEvents()
        self.announcement = SaveAnnouncement()
        """Tells all ranks that a checkpoint is due."""
        self.hosts = HostParts(world, self.store, self.announcement, loses_ranks)
        """Writes parts of checkpoints with other hosts, if they share the directory."""

    def meet(self) -> None:
        """Find out which ranks write. Every rank must call it, when its world is new. See `HostParts.meet`."""
        self.announcement.meet()
        self.hosts.meet()

    def announce(self, total_steps: int, *, is_wanted: bool) -> None:
        """Let all ranks know in a step whether a checkpoint is due after it.

        Args:
            total_steps: Steps done in all after it.
            is_wanted: True if rank 0 wants one in any case.
        """
        if self._writer is not None and self._directory is not None:
            is_wanted = is_wanted and not self._directory.is_lost
            self.announcement.announce(is_wanted=is_wanted or self._rule.is_due_after_step(total_steps))

    def find(
        self, resume: Resume, *, in_parts: bool, by_main: bool, owner: Callable[[str, str], int | None] | None
    ) -> ResumedRun | None:
        """Lock the directory and return the newest good checkpoint; None without a directory.

        Every rank must call it. See `resume.find`, also for the arguments and for errors.

        Raises:
            ValueError: resume="must" without a directory.
        """
        directory = self._directory
        if directory is None:
            if resume == "must":
                raise ValueError('resume="must" needs the directory of the run: pass directory=...')
            return None
        return find(
            self._world,
            directory.path,
            directory.store,
            directory.lock,
            resume,
            in_parts=in_parts,
            by_main=by_main,
            owner=owner,
            apart=self._apart,
        )

    @property
    def store(self) -> CheckpointStore | None:
        """The checkpoints of the run; None without a directory."""
        return None if self._directory is None else self._directory.store

    @property
    def best(self) -> BestCheckpoint | None:
        """The best checkpoint, on the rank that writes; None on others and without a directory."""
        return None if self._writer is None else self._writer.best

    def begin(self, log: EventLog, place: Place, history: EvaluationHistory, *, resumed: bool) -> None:
        """Start counting steps and time since the last checkpoint, and start the writer on rank 0."""
        self._events.begin(log)
        self._rule.begin(place)
        if self._directory is not None and self._world.rank == 0:
            self._writer = CheckpointWriter(self._directory, self._policy, self._events, self.hosts, self._apart)
            self._writer.best.begin(history, step=place[2], resumed=resumed)

    def take_over(self, saved: Place) -> None:
        """Continue in the place of a rank that has died.

        Args:
            saved: The place at which the latest checkpoint was due. It may not be complete.

        Raises:
            CheckpointError: Another job uses the directory.
        """
        self._rule.last = saved
        if self._directory is not None and self._world.rank == 0:
            newest = self._directory.take_over()
            if newest < saved[2]:
                self._rule.last = (-1, -1, newest)

    @property
    def last(self) -> Place:
        """The place of the latest checkpoint, or of the start."""
        return self._rule.last

    def on_taken(self, rescue: Callable[[], object]) -> None:
        """Let a later Trainer of this process that takes the directory call a function before it reads there."""
        assert self._directory is not None
        self._directory.on_taken(rescue)

    def report(self, history: EvaluationHistory, added: Sequence[Evaluated]) -> None:
        """Consider the results of an evaluation for the best checkpoint. Local; the same on all ranks.

        Raises:
            ValueError: Several evaluations have a metric of the name that decides.
        """
        metric = self._policy.best
        if metric is None:
            return
        history.of(metric)
        if self._writer is not None:
            for each in added:
                if each.is_called(metric):
                    self._writer.best.report(each.step, each.value)

    def settle(self) -> None:
        """Wait until no checkpoint is being written, and record the best one if it is on the disk."""
        if self._writer is not None:
            self._writer.settle()

    @property
    def writes(self) -> bool:
        """True on the rank that writes checkpoints, if there is a directory."""
        return self._writer is not None

    @property
    def last_step(self) -> int:
        """Steps done at the last checkpoint, or at the start."""
        return self.last[2]

    def is_newer(self, place: Place) -> bool:
        """Return True if the state at a place is not in the last checkpoint and this rank can still write it."""
        if self._writer is None or (self._directory is not None and self._directory.is_lost):
            return False
        return place != self.last or self._writer.has_failed

    def is_wanted_at_end(self, place: Place) -> bool:
        """Return True if `finish` would write a checkpoint on this rank."""
        if self._writer is None:
            return False
        return self.is_newer(place) or self._writer.best.needs_checkpoint(place[2])

    def hold(self) -> None:
        """Lock the directory again, on the rank that writes; see `RunDirectory.hold`."""
        if self._writer is not None and self._directory is not None:
            self._directory.hold(self.last[2])

    def hold_on_all(self) -> None:
        """Call `hold`, and raise on all ranks if it raises on rank 0. Every rank must call it. One small exchange."""
        if self._directory is None:
            return
        with raised_on_all(self._world, "Trainer beginning"):
            self.hold()

    def save_if_due(
        self, place: Place, capture: Callable[[], Snapshot], *, epoch_ended: bool = False, due: bool | None = None
    ) -> None:
        """Write a checkpoint in the background if the policy asks for one now, or if it would be the best one.

        Args:
            place: The place of the run.
            capture: Returns its state.
            epoch_ended: True if the loop asks for its next epoch.
            due: Whether ranks have brought the state together to save it. None: it need not come together.

        Raises:
            BaseException: On rank 0, the exception of a listener from an earlier checkpoint; nothing is saved.
            CheckpointError, ValueError: On rank 0, see `save`.
        """
        told = self.announcement.is_agreed or self._rule.is_due_by_epoch(place, epoch_ended=epoch_ended)
        self.announcement.forget()
        occasion = self.hosts.asked(place) if told else None
        if self._writer is None:
            if occasion is not None:
                self.hosts.offer(occasion)
            return
        self._events.raise_for_listener()
        best = self._writer.best
        if best.has_candidate:
            if due is not False and best.needs_checkpoint(place[2]):
                self.submit(place, capture, occasion)
                return
            if not self._writer.is_writing:
                best.record_written()
        if due is None:
            due = self._asks_for_one(place, epoch_ended=epoch_ended, told=told)
        if due and place != self.last:
            self._events.raise_for_listener()
            self.submit(place, capture, occasion)

    def is_due(self, place: Place, *, epoch_ended: bool) -> bool:
        """Return True if `save_if_due` would save on this rank."""
        if self._writer is None:
            return False
        if self._writer.best.has_candidate and self._writer.best.needs_checkpoint(place[2]):
            return True
        return self._asks_for_one(place, epoch_ended=epoch_ended)

    def _asks_for_one(self, place: Place, *, epoch_ended: bool, told: bool = True) -> bool:
        """Return True if the policy asks for a checkpoint now; by time only if other hosts are told, if those write."""
        if self.hosts.has_failed and place != self.last:
            return True
        # Hosts that do not know it yet will know it in the next step.
        return self._rule.is_due(place, epoch_ended=epoch_ended, by_time=told or not self.hosts.are_shared)

    def save(self, place: Place, capture: Callable[[], Snapshot], *, on_all: bool = False) -> None:
        """Write a checkpoint in the background, now.

        A full disk does not end a run: an earlier failure becomes a warning event, and this newer state is written.

        Args:
            place: The place of the run.
            capture: Returns its state.
            on_all: True if all ranks call it, so that hosts may write parts.

        Raises:
            BaseException: The exception of a listener from an earlier checkpoint; nothing is saved.
            CheckpointError: The directory is not available (see `hold`), or the state cannot be stored.
        """
        occasion = self.hosts.called(place) if on_all else None
        if occasion is not None:
            self.hosts.offer(occasion)
        self._events.raise_for_listener()
        self.submit(place, capture, occasion)

    def submit(self, place: Place, capture: Callable[[], Snapshot], occasion: Occasion | None = None) -> None:
        """Write a checkpoint as `save` does, but keep a listener's exception for later.

        Args:
            place: The place of the run.
            capture: Returns its state.
            occasion: When other hosts offer their parts. None: this rank writes alone.
        """
        self.hold()
        if self._writer is not None:
            self._writer.submit(place, capture, occasion)
        self._rule.begin(place)

    def save_tag(self, tag: str, place: Place, capture: Callable[[], Snapshot]) -> None:
        """Write a checkpoint that is kept until the user deletes it, and wait on all ranks until it is on disk.

        Every rank must call it.

        Raises:
            CheckpointError: On all ranks, if it cannot be written.
        """
        if self._directory is None:
            return
        occasion = self.hosts.called(place, tag)
        with raised_on_all(self._world, "trainer.save(tag=...)"):
            if occasion is not None:
                self.hosts.offer(occasion)
            if self._writer is not None:
                started_s = time.monotonic()
                self.hold()
                self._writer.join()
                info = None if occasion is None else self.hosts.write(occasion, capture)
                if info is None:
                    groups, document = capture()
                    info = self._directory.store.write(place[2], groups, document, tag=tag)
                self._events.tell(info, time.monotonic() - started_s)
        self.hosts.withdraw()

    def finish(self, place: Place, capture: Callable[[], Snapshot], *, retry: bool = True) -> None:
        """Write a state newer than the last checkpoint, and wait on all ranks until it is on disk.

        Every rank must call it. The directory is then free for other jobs, until this one saves again.

        Args:
            place: The place of the run.
            capture: Returns its state.
            retry: Try once more if the last checkpoint was of this place and could not be written.

        Raises:
            CheckpointError: On all ranks, if it cannot be written: otherwise the end of a run would be lost silently.
                On rank 0 it is what an object's state_dict raised, if that is the reason.
            BaseException: On rank 0, what a listener raised when a checkpoint was written.
        """
        if self._directory is None:
            return
        occasion = self.hosts.ending(place)
        with raised_on_all(self._world, "Trainer ending"):
            if occasion is not None:
                self.hosts.offer(occasion)
            if self._writer is not None:
                error = self._writer.wait()
                due = self._writer.best.needs_checkpoint(place[2])
                if place != self.last or (retry and (error is not None or due)):
                    self.submit(place, capture, occasion)
                    error = self._writer.wait()
                    if self.hosts.has_failed:
                        self.submit(place, capture)
                        error = self._writer.wait()
                if error is not None:
                    raise error
        self.hosts.withdraw()
        self._directory.release()
        self._events.raise_for_listener()

    def rescue(self, place: Place, capture: Callable[[], Snapshot]) -> None:
        """Write a state newer than every checkpoint, in this thread, while the process ends.

        A failure becomes a warning event.
        """
        if self._writer is not None and self._directory is not None and not self._directory.is_lost:
            self._writer.rescue(place, capture, last=self.last)
