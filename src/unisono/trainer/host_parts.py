"""Checkpoints of which each host writes a part, where every rank has the whole state and all hosts see the directory.

Whether they do is found out when ranks meet, at the start of a run and after a recovery: rank 0 leaves a file with a
random name, and one rank of each host looks for it and makes one beside it. A save then needs no exchange, so ranks
may die at any moment of it: each knows the name of the folder and who writes what, copies its part, and writes it as
soon as the folder is there (`state.part_writing`). Rank 0 decides. What it does not begin, the others drop. When ranks
have met, rank 0 writes alone until they have made a step together. Start reading at `HostParts.meet`,
`HostParts.offer` and `HostParts.begin`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from unisono.collectives.world import World
from unisono.errors import CheckpointError
from unisono.job.ranks import local_world_size
from unisono.state.checkpoint_store import CheckpointInfo, CheckpointStore
from unisono.state.checkpoint_work import CheckpointWork
from unisono.state.digest import copied_range
from unisono.state.manifest import SUFFIX
from unisono.state.part_plan import PartPlan, even_plan
from unisono.state.part_writing import POLL_S, FileRange, PartsError, PartWriter
from unisono.state.safetensors_format import tied_names
from unisono.state.temporary_paths import meeting_path, new_mark
from unisono.trainer.part_saving import OwnPart, completion, fail
from unisono.trainer.save_announcement import SaveAnnouncement
from unisono.trainer.save_rule import Place
from unisono.trainer.snapshot import Subjects, capture_trained

__all__ = ["HostParts", "Occasion", "Snapshot"]

_PATIENCE_S = 2.0
"""Seconds for which a part is offered after the program of this process has ended."""
_AWAITED_S = 10.0
"""Seconds for which others wait for rank 0 while it waits for a part: fewer than launchers give a process to end."""

Snapshot = tuple[dict[str, dict[str, Tensor]], dict[str, Any]]
"""The state of a run as a checkpoint has it: tensors by group and name, and the document."""


_ASKING, _ENDING = 0, 1
"""Numbers of occasions: the loop asks for a batch or an epoch, and the run ends. Calls of the user's follow."""


class Occasion(NamedTuple):
    """When several hosts may write a checkpoint: equal on all ranks, and unlike any other since they have met."""

    place: Place
    """Of the run."""
    number: int = 0
    """Tells those of one place apart."""
    tag: str | None = None
    """See `CheckpointStore.write`."""


class _OfferedPart(NamedTuple):
    """A part that this rank writes if rank 0 begins the checkpoint."""

    total_steps: int
    thread: threading.Thread
    withdrawn: threading.Event


class HostParts:
    """Writes this rank's parts of checkpoints, if it is the one of its host that does.

    Args:
        world: The ranks, which may be different ones later.
        store: The checkpoints of the run. None: it has none.
        announcement: Tells all ranks that a checkpoint is due, and when they have made a step together.
        loses_ranks: Returns True if ranks are lost that the others have not replaced yet. Called in any thread.
    """

    def __init__(
        self,
        world: World,
        store: CheckpointStore | None,
        announcement: SaveAnnouncement,
        loses_ranks: Callable[[], bool],
    ) -> None:
        self._world, self._store, self._announcement, self._loses_ranks = world, store, announcement, loses_ranks
        self._subjects: Subjects | None = None
        self._ranks: list[int] = []
        self._mark = ""
        self._meetings = self._calls = 0
        self._offers: list[_OfferedPart] = []
        self._awaited_since: float | None = None
        """When ranks began to wait for this one."""
        self.has_failed = False
        """True after a part has not come, until a checkpoint is begun."""

    def divide(self, subjects: Subjects) -> None:
        """Let hosts write parts, where they find that they share the directory. The next call is `meet`.

        Args:
            subjects: The objects of the run, of which each rank has the whole state.
        """
        self._subjects = subjects

    @property
    def are_shared(self) -> bool:
        """True if several hosts write parts. Equal on all ranks."""
        return len(self._ranks) > 1

    def asked(self, place: Place) -> Occasion | None:
        """Return the occasion that the loop asks for a batch or an epoch; None if rank 0 writes alone."""
        return Occasion(place, _ASKING) if self._are_together else None

    def called(self, place: Place, tag: str | None = None) -> Occasion | None:
        """Return the occasion that the user calls for a checkpoint on all ranks; None if rank 0 writes alone."""
        if not self._are_together:
            return None
        self._calls += 1
        return Occasion(place, _ENDING + self._calls, tag)

    def ending(self, place: Place) -> Occasion | None:
        """Return the occasion that the run ends; None if rank 0 writes alone."""
        return Occasion(place, _ENDING) if self._are_together else None

    @property
    def _are_together(self) -> bool:
        """True if all ranks come to the same occasions: none has come to one as the ranks that they were before."""
        return self.are_shared and self._announcement.has_stepped

    def meet(self) -> None:
        """Find out who writes from now on. Every rank must call it, when its world is new. Two small exchanges.

        What was under way goes on where all parts of it have been begun, and is given up otherwise.
        """
        self.withdraw()
        world = self._world
        self._meetings += 1
        self._ranks, self._mark, self._calls = [], "", 0
        if self._store is None or self._subjects is None or local_world_size() >= world.size:
            return
        mark = world.broadcast_bytes(self._leave_mark).decode()
        if not mark:
            return
        is_first, sees = world.local_rank == 0, False
        if is_first and world.rank:
            own = meeting_path(self._checkpoints.folder, mark, world.rank)
            with suppress(OSError):
                own.touch(exist_ok=False)
                sees = meeting_path(self._checkpoints.folder, mark).exists()
                own.unlink()
        found = world.gather((is_first, sees), "ranks that look for a directory of all hosts")
        if world.rank == 0:
            with suppress(OSError):
                meeting_path(self._checkpoints.folder, mark).unlink()
        others = [rank for rank, (is_first, _) in enumerate(found) if is_first and rank]
        if found[0][0] and all(found[rank][1] for rank in others):
            self._ranks, self._mark = [0, *others], mark

    def offer(self, occasion: Occasion) -> None:
        """Copy this rank's part, and write it in the background once rank 0 has begun the checkpoint. Local.

        On rank 0, and on ranks that write nothing, it does nothing. Memory: the part.

        Raises:
            CheckpointError: A tensor cannot be stored.
        """
        # Rank 0 may come later to what was offered since the last step, but not to what was offered before it.
        self.withdraw(before=occasion.place[2])
        for each in self._offers:
            if each.withdrawn.is_set():
                each.thread.join()
        self._offers = [each for each in self._offers if each.thread.is_alive()]
        rank = self._world.rank
        if rank not in self._ranks[1:]:
            return
        assert self._subjects is not None
        groups, _ = capture_trained(self._subjects)
        plans = self._plan(groups)
        write = partial(_write_offered, self._work(occasion), rank, plans, self._own_ranges(plans, groups))
        withdrawn = threading.Event()
        thread = threading.Thread(target=write, args=(withdrawn,), name="part of a checkpoint")
        self._offers.append(_OfferedPart(occasion.place[2], thread, withdrawn))
        thread.start()

    def withdraw(self, *, before: int | None = None) -> None:
        """Drop the parts that this rank offers, unless rank 0 has begun those checkpoints.

        Args:
            before: Only those of fewer steps. None: all.
        """
        for each in self._offers:
            if before is None or each.total_steps < before:
                each.withdrawn.set()

    def begin(self, occasion: Occasion, capture: Callable[[], Snapshot]) -> Callable[[], CheckpointInfo]:
        """Begin a checkpoint on rank 0, and return what completes it, in any thread. Memory: the part of this rank.

        If a part does not come, `has_failed` is True then.

        Args:
            occasion: When.
            capture: Returns the state of the run.

        Raises:
            CheckpointError: A tensor cannot be stored.
        """
        complete = self._begin(occasion, capture)

        def completed() -> CheckpointInfo:
            try:
                return complete()
            except CheckpointError as error:
                self.has_failed = isinstance(error.__cause__, PartsError)
                raise

        return completed

    def _begin(self, occasion: Occasion, capture: Callable[[], Snapshot]) -> Callable[[], CheckpointInfo]:
        try:
            work = self._checkpoints.begin_parts(occasion.place[2], tag=occasion.tag, mark=self._mark_of(occasion))
        except CheckpointError as error:
            return partial(fail, error)
        try:
            writer = PartWriter(work.path, 0)
        except OSError as error:
            work.close()
            return partial(fail, work.explained(error))
        try:
            groups, document = capture()
            plans = self._plan(groups)
            ranges = self._own_ranges(plans, groups)
        except BaseException:
            writer.close()
            work.close()
            raise
        return completion(
            self._checkpoints,
            work,
            OwnPart(writer, plans, ranges, {}, self._ranks),
            lambda _: (groups, document),
            gives_up=self.patience(),
        )

    def patience(self) -> Callable[[bool], str]:
        """Return what says, from now on, why a part is not worth waiting for, if it is not; see `await_parts`."""
        return partial(self._why_given_up, self._meetings)

    def _why_given_up(self, meetings: int, is_begun: bool) -> str:
        """Return why a part is not worth waiting for; "" if it is.

        Args:
            meetings: How often ranks had met when the checkpoint was begun.
            is_begun: True if the part is being written, as far as is seen from here: a host that is lost may leave its
                locks on a network file system.
        """
        since, have_met = self._awaited_since, meetings != self._meetings
        if (since is not None and self._loses_ranks()) or (have_met and not is_begun):
            return "when a rank was lost"
        is_late = since is not None and time.monotonic() - since > _AWAITED_S
        return f"and others had waited {_AWAITED_S:.0f} s for it" if is_late and (have_met or not is_begun) else ""

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """While in this context, do not wait long for parts: ranks wait for this one."""
        self._awaited_since = time.monotonic()
        try:
            yield
        finally:
            self._awaited_since = None

    def write(self, occasion: Occasion, capture: Callable[[], Snapshot]) -> CheckpointInfo | None:
        """Write a checkpoint on rank 0 while all ranks wait; None if a part has not come.

        Raises:
            CheckpointError: It cannot be written.
        """
        try:
            with self.awaited():
                return self._begin(occasion, capture)()
        except CheckpointError as error:
            if not isinstance(error.__cause__, PartsError):
                raise
            return None

    @property
    def _checkpoints(self) -> CheckpointStore:
        assert self._store is not None, "hosts share a directory"
        return self._store

    def _leave_mark(self) -> bytes:
        """Leave a file that ranks of other hosts find, and return its mark; nothing if it cannot be made."""
        mark = new_mark()
        try:
            meeting_path(self._checkpoints.folder, mark).touch(exist_ok=False)
        except OSError:  # a save tells why
            return b""
        return mark.encode()

    def _mark_of(self, occasion: Occasion) -> str:
        epoch, step, _ = occasion.place
        return f"{self._mark}{epoch:08x}{step:08x}{occasion.number:04x}"

    def _work(self, occasion: Occasion) -> CheckpointWork:
        """Return the folder that rank 0 makes."""
        return CheckpointWork(self._checkpoints.folder, occasion.place[2], occasion.tag, mark=self._mark_of(occasion))

    def _plan(self, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, PartPlan]:
        """Return who writes what of the groups that all ranks have."""
        return {
            group: even_plan(group, groups[group], tied_names(groups[group]), len(self._ranks))
            for group in ("model", "ema", "optimizer")
            if group in groups
        }

    def _own_ranges(self, plans: Mapping[str, PartPlan], groups: Mapping[str, Mapping[str, Tensor]]) -> list[FileRange]:
        """Copy what this rank writes."""
        number = self._ranks.index(self._world.rank)
        ranges: list[FileRange] = []
        for group, plan in plans.items():
            if not number:
                ranges.append(FileRange(group + SUFFIX, 0, plan.layout.header))
            for claim, at in plan.starts[number].items():
                own = copied_range(groups[group][claim.name], claim.start, claim.stop, f"{group}.{claim.name}")
                ranges.append(FileRange(group + SUFFIX, at, own))
        return ranges


def _write_offered(
    work: CheckpointWork,
    rank: int,
    plans: Mapping[str, PartPlan],
    ranges: list[FileRange],
    withdrawn: threading.Event,
) -> None:
    """Write a part once the folder is there; nothing if it does not come, or this rank cannot write to it."""
    ended_s: float | None = None
    while not _is_there(work):
        if withdrawn.wait(POLL_S) and not _is_there(work):
            return
        if not threading.main_thread().is_alive():
            ended_s = time.monotonic() if ended_s is None else ended_s
            if time.monotonic() - ended_s > _PATIENCE_S:
                return
    with suppress(OSError):  # rank 0 has given up, or will tell that this rank does not write
        writer = PartWriter(work.path, rank)
        writer.write(ranges, {group + SUFFIX: plan.layout for group, plan in plans.items()})


def _is_there(work: CheckpointWork) -> bool:
    # A network file system answers from its cache where a name is looked up that was not there.
    with suppress(OSError):
        return work.path in work.path.parent.iterdir()
    return False
