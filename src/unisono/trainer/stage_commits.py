"""Commits of the state of a cut model's stages, so that the part of a rank that dies is not lost.

Each rank copies its state into memory that all ranks of the host share, after each step and before it gives back the
memory of other stages. A commit counts once all ranks have made theirs: then a step returns, and not before. The copy
from the commit before is whole as long as the next one is under way, so all ranks can return to it. Start reading at
`StageCommits.commit`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from unisono.collectives.world import World
from unisono.engine.shared import SharedRuntime
from unisono.engine.shared.update_progress import UpdateProgress
from unisono.engine.staged.state_slots import StateContent, StateSlots, slots_nbytes
from unisono.engine.step_transaction import StepTransaction
from unisono.errors import PeerError, UnisonoError
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.shm.handshake import handshake
from unisono.shm.segment import Segment, aligned
from unisono.trainer.stage_state import StageState

__all__ = ["StageCommits"]

_WHAT = "waiting for all ranks to have a copy of the step"
_GROWN = "the state of the optimizer has become too large for the memory in which ranks keep it for each other"
_ALONE = (
    "ranks are at different steps: this one has done a step that has failed on another rank, which went on. A step "
    "that fails on one rank must fail on all, or end the job."
)
CHANGED = "weights or buffers of a part of the model were changed between two steps, and only their rank has them"


class StageCommits:
    """The commits of one run on one rank.

    Args:
        world: All ranks.
        cut: The model.
        state: The state of this rank's stages.
        is_on: Returns True if ranks of this run may be replaced.
        refuse: Tells the launcher why they must not be any more.
    """

    def __init__(
        self,
        world: World,
        cut: CutModel,
        state: StageState,
        *,
        is_on: Callable[[], bool],
        refuse: Callable[[str], None],
    ) -> None:
        self._world, self._cut, self._state = world, cut, state
        self._is_on, self._refuse = is_on, refuse
        self._runtime: SharedRuntime | None = None
        self._slots: StateSlots | None = None
        self._progress: UpdateProgress | None = None
        self._number = self._attempt = 0
        self._version = -1
        self._is_off = False

    @property
    def is_established(self) -> bool:
        """True if the state of all stages is in the memory of the host, as it is after the latest commit."""
        return self._number > 0 and self._slots is not None

    def begin(self) -> None:
        """Note that a step begins. Every rank must call it."""
        self._attempt += 1
        if self.was_changed():
            self._refuse(CHANGED)

    def was_changed(self) -> bool:
        """Return True if weights were changed since the last commit; no step may be under way."""
        if self._slots is None or not self._number or self._cut.ownership.whole == "everywhere":
            return False
        version = self._state.version()
        if version == self._version:
            return False
        if not self._state.equals(self._slots.read(self._world.rank, self._number)):
            return True
        self._version = version
        return False

    def give_up(self) -> None:
        """Note that this rank does not end the step that it has begun, unless it has already."""
        if self._progress is not None:
            self._progress.give_up(self._attempt)

    def commit_base(self) -> None:
        """Commit the state from which training goes on, while all ranks have all of it. Every rank must call it."""
        if self._is_off or self._runtime is None:
            return
        if self._slots is None and not self._establish(self._runtime):
            self._is_off = True
            return
        self._state.forget()
        self.commit(StepTransaction())

    def commit(self, step: StepTransaction) -> None:
        """Commit a step that this rank has done, with averages. Every rank must call it, if there was a base.

        All ranks that return have all made theirs. Traffic: one pass over the state of this rank's stages.

        Args:
            step: The step. Its work that was deferred is done while this rank waits for others.

        Raises:
            PeerError: A rank has died or given up before it had made its own: the step did not happen.
            UnisonoError: A rank is in another call, since this step failed there alone.
        """
        if self._slots is None or self._runtime is None or self._progress is None:
            return
        number = self._number + 1
        self._slots.write(number, self._state.content())
        if self._slots.is_full:
            self._refuse(_GROWN)  # before the others go on: none of them is replaced from now on
        self._progress.end(number, unsettled=False)
        try:
            self._runtime.barrier(_WHAT, step)
        except PeerError:
            if not self._progress.wait_until_committed(number, self._attempt):
                raise
        if self._progress.committed() < number:
            raise UnisonoError(_ALONE)
        self._number, self._version = number, self._state.version()
        if self._slots.is_full:
            self._slots, self._is_off = None, True

    def settle(self) -> int:
        """Find which commit counts, once all ranks have left the call in which some have died; the same on all.

        Returns:
            How many more there were than this rank knew of: 1 if its own wait for a commit was broken off, otherwise 0.
        """
        before = self._number
        if self._progress is not None:
            self._number, self._progress = self._progress.committed(), None
        return self._number - before

    def return_to_last(self) -> None:
        """Put back the state of this rank's stages as it is after the latest commit."""
        self._state.put(self._own())
        self._put_shared()

    def connect(self, runtime: SharedRuntime | None) -> None:
        """Use the shared memory of the ranks that there are now, and give new ones what there is. Every rank must call.

        Args:
            runtime: Their memory; None if they have none.
        """
        self._runtime, self._attempt, self._progress = runtime, 0, None
        if runtime is None:  # none of these ranks is replaced
            return
        call = "ranks that keep the parts of a model for each other"
        numbers: list[int] = self._world.gather(self._number if self._slots is not None else 0, call)
        number = max(numbers)
        if not number:
            self._slots = None
            return
        assert set(numbers) <= {0, number}, f"ranks are at different commits: {numbers}"
        self._share(runtime, [rank for rank, each in enumerate(numbers) if not each], source=numbers.index(number))
        self._number = number
        self._begin_progress(runtime)

    def read(self, place: int) -> StateContent:
        """Return the state of a rank of this pipeline after the latest commit. Its tensors lie in shared memory."""
        assert self._slots is not None
        replica = self._world.rank // self._cut.ranks.size
        return self._slots.read(replica * self._cut.ranks.size + place, self._number)

    def _own(self) -> StateContent:
        return self.read(self._cut.ranks.place)

    def _put_shared(self) -> None:
        """Take over the parameters that this rank uses and others update."""
        for place in range(self._cut.ranks.size):
            if place != self._cut.ranks.place:
                self._state.put_shared(self.read(place))
        self._version = self._state.version()

    def _establish(self, runtime: SharedRuntime) -> bool:
        """Allocate the memory; return False if that is not possible, or not wanted. Every rank must call it."""
        own = aligned(self._state.capacity) if self._is_on() else 0
        capacities: list[int] = self._world.gather(own, "trainer.step keeping the parts of a model")
        if not all(capacities):
            return False
        try:
            segment = runtime.segment(
                slots_nbytes(capacities),
                "stages",
                prepare=StateSlots.prepare(capacities),
                keeps_descriptor=True,
            )
        except UnisonoError as error:
            if isinstance(error, PeerError):
                raise
            self._refuse(f"there is no shared memory in which ranks could keep the parts of a model: {error}")
            return False
        self._slots = StateSlots(segment, rank=self._world.rank)
        self._begin_progress(runtime)
        return True

    def _share(self, runtime: SharedRuntime, new: list[int], *, source: int) -> None:
        """Give the memory to ranks that lack it."""
        ranks, rank = [source, *new], self._world.rank
        if not new or rank not in ranks:
            return

        def make() -> Segment:
            assert self._slots is not None
            return Segment(os.dup(self._slots.segment.fd))

        segment, peers = handshake(
            self._world.store(f"{runtime.name}/stages"),
            rank=ranks.index(rank),
            size=len(ranks),
            timeout_s=runtime.timeout_s,
            make=make,
            names=ranks,
            keeps_descriptor=rank != source,
        )
        peers.close()
        if rank != source:
            self._slots = StateSlots(segment, rank=rank)

    def _begin_progress(self, runtime: SharedRuntime) -> None:
        """Make words for commits to come, once all ranks say that they have the latest one."""
        progress = UpdateProgress(runtime, 0)
        progress.end(self._number, unsettled=False)
        runtime.barrier("waiting for ranks that keep the parts of a model", StepTransaction())
        self._progress = progress
