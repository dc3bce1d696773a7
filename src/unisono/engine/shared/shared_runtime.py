"""Synchronization of the ranks of one host through shared memory: segments, barriers and an abort flag.

Each Trainer has one runtime. Semaphores (`shm.semaphore`) publish the writes of ranks. If a rank dies, or breaks off in
the middle of a step, the others raise within a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import cast

from torch import Tensor
from torch.distributed import DistBackendError

from unisono.activity import Observed, Wait
from unisono.collectives.world import World
from unisono.engine.step_transaction import Passed, StepTransaction
from unisono.errors import PeerError
from unisono.machine import usable_cores
from unisono.polling import Backoff
from unisono.shm.abort_flag import AbortFlag
from unisono.shm.handshake import died_in_handshake, handshake
from unisono.shm.peer_wait import PeerWait
from unisono.shm.peers import Newcomers, Peers
from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["Barrier", "SharedRuntime"]

_WORDS = 8

# A wait that lasts longer gained nothing by polling, or others want the core: then each poll costs a time slice, and a
# sleeping process is woken sooner. So the next waits begin with sleep.
_WORTH_POLLING_S = 0.001


class Barrier:
    """A reusable barrier: every rank arrives at it, and may then wait until all others have arrived too."""

    def __init__(self, segment: Segment, offset: int, peers: Peers) -> None:
        size, rank = peers.size, peers.rank
        self._others = [r for r in range(size) if r != rank]
        self._outgoing = [
            Semaphore(segment.address + offset + (rank * size + r) * SEMAPHORE_NBYTES) for r in self._others
        ]
        self._incoming = {
            r: Semaphore(segment.address + offset + (r * size + rank) * SEMAPHORE_NBYTES) for r in self._others
        }
        self._seen = dict.fromkeys(self._others, 0)
        self._arrived = 0

    def arrive(self) -> None:
        """Signal to the other ranks that this rank has arrived once more, and publish its earlier writes."""
        self._arrived += 1
        for semaphore in self._outgoing:
            semaphore.post()

    def late(self) -> list[int]:
        """List the ranks that have arrived less often than this one."""
        late = []
        for rank in self._others:
            while self._seen[rank] < self._arrived:
                if not self._incoming[rank].try_wait():
                    late.append(rank)
                    break
                self._seen[rank] += 1
        return late

    def wait(self, rank: int, timeout_s: float) -> None:
        """Sleep until a rank arrives, for at most `timeout_s`."""
        if self._incoming[rank].wait(timeout_s):
            self._seen[rank] += 1


class SharedRuntime:
    """The shared memory of a Trainer on one host. Every rank must build it, and make its collective calls in one order.

    Args:
        world: The ranks. Its timeout bounds every wait for other ranks.
        name: A name that no other runtime of this job has.
        processes: The processes of all ranks, as `own_process` describes them.
        ranks: What errors call the ranks; None: by their numbers in the world.
    """

    def __init__(
        self, world: World, name: str, processes: Sequence[str], *, ranks: Sequence[int] | None = None
    ) -> None:
        self.world, self.name, self.timeout_s = world, name, world.timeout_s
        self.rank, self.size = world.rank, world.size
        self._handshakes = 0
        barrier_nbytes = aligned(self.size**2 * SEMAPHORE_NBYTES)
        flag_nbytes = aligned(AbortFlag.nbytes(self.size))
        words_offset = flag_nbytes + 2 * barrier_nbytes

        def make() -> Segment:
            segment = Segment.create(words_offset + 8 * _WORDS * self.size, name="unisono trainer")
            AbortFlag.create(segment, 0, self.size)
            for barrier_offset in (flag_nbytes, flag_nbytes + barrier_nbytes):
                for i in range(self.size**2):
                    Semaphore(segment.address + barrier_offset + i * SEMAPHORE_NBYTES).create()
            return segment

        with Newcomers() as newcomers:
            for rank, process in enumerate(processes):
                if rank != self.rank:
                    newcomers.add(rank, process)

            def look() -> None:
                if dead := newcomers.dead():
                    raise PeerError(died_in_handshake(dead))

            segment, self._peers = self._handshake(make, look)
        self._abort_flag = AbortFlag(segment, 0, rank=self.rank, size=self.size)
        self._peer_wait = PeerWait(
            self._abort_flag,
            self._peers,
            ranks=range(self.size) if ranks is None else ranks,
            group="of the Trainer",
            timeout_s=self.timeout_s,
            polls=self.size <= usable_cores(),
        )
        self._barrier = Barrier(segment, flag_nbytes, self._peers)
        self._release = Barrier(segment, flag_nbytes + barrier_nbytes, self._peers)
        self.awaits_release = False
        """True if an engine waits until no rank reads the last step's gradient."""
        self.loss: PeerError | None = None
        """The loss of a rank, noticed at the end of a step that is committed all the same: the next step raises it."""
        self._words = memoryview(segment.memory)[words_offset : words_offset + 8 * _WORDS * self.size].cast("q")
        self.keeps_descriptors = False
        """True to keep the descriptors of all segments, so that further processes can be given them."""
        self._kept: list[Segment] = []
        self._polling = Backoff()
        self._numbers = cast(Iterator[Passed], count(1))
        self.barriers = Passed(0)
        """The number of barriers that have been passed."""

    def publish(self, word: int, number: int) -> None:
        """Write one of this rank's words, which the other ranks see after the next barrier."""
        self._words[self.rank * _WORDS + word] = number

    def published(self, word: int, passed: Passed) -> list[int]:
        """Return one word of each rank, as it was at the latest barrier, `passed`."""
        assert passed == self.barriers, "ranks may have published other numbers since"
        return self._words[word::_WORDS].tolist()

    def segment(
        self,
        nbytes: int,
        what: str,
        *,
        prepare: Callable[[Segment], None] | None = None,
        keeps_descriptor: bool = False,
    ) -> Segment:
        """Allocate memory that all ranks share, filled with zeros. Every rank must call it, with equal arguments.

        Args:
            nbytes: The size.
            what: A name, for people who look at /proc/PID/maps.
            prepare: Called with the segment on one rank, to write to it before the other ranks have it.
            keeps_descriptor: See `handshake`.
        """

        def make() -> Segment:
            segment = Segment.create(nbytes, name=f"unisono {what}")
            if prepare is not None:
                prepare(segment)
            return segment

        keeps = keeps_descriptor or self.keeps_descriptors
        try:
            segment, peers = self._handshake(make, look=self._look, keeps_descriptor=keeps)
        except DistBackendError as error:
            raise _lost(error) from error
        peers.close()
        if keeps and not keeps_descriptor:
            self._kept.append(segment)
        return segment

    def segment_of(self, tensor: Tensor) -> Segment:
        """Return the segment that has a tensor, of those whose descriptors this object keeps."""
        address = tensor.data_ptr()
        return next(each for each in reversed(self._kept) if each.address <= address < each.address + each.nbytes)

    def release_segments(self, needed: Collection[Segment]) -> None:
        """Close the descriptors that were kept, but for those of some segments."""
        for segment in self._kept:
            if segment not in needed:
                segment.close_descriptor()
        self._kept = [segment for segment in self._kept if segment in needed]

    @property
    def barrier_nbytes(self) -> int:
        """The memory of a further barrier."""
        return self.size**2 * SEMAPHORE_NBYTES

    def prepare_barrier(self, segment: Segment) -> None:
        """Initialize a barrier at the beginning of a segment, before the other ranks have it."""
        for i in range(self.size**2):
            Semaphore(segment.address + i * SEMAPHORE_NBYTES).create()

    def barrier_in(self, segment: Segment) -> Barrier:
        """Return the barrier at the beginning of a segment, to be used with `wait_at`."""
        return Barrier(segment, 0, self._peers)

    def wait_at(self, barrier: Barrier, what: str, seen: Mapping[int, Wait]) -> None:
        """Wait until all ranks have arrived at a further barrier as often as this one.

        Args:
            barrier: The barrier.
            what: The name of the wait in errors.
            seen: How observers see the wait for each of the other ranks.

        Raises:
            PeerError: See `barrier`.
        """
        while is_late := barrier.late():
            awaited = is_late[0]
            deadline_s = time.monotonic() + self.timeout_s

            def late(rank: int = awaited) -> list[int]:
                return [rank] if rank in barrier.late() else []

            with Observed(seen[awaited]):
                try:
                    self._peer_wait.wait(late, barrier.wait, lambda: what, deadline_s=deadline_s)
                except DistBackendError as error:
                    raise _lost(error) from error

    def arrive(self) -> None:
        """Signal to the other ranks that this rank is at the next barrier, and publish its earlier writes."""
        self._barrier.arrive()

    def barrier(
        self,
        what: str,
        step: StepTransaction,
        *,
        meanwhile: Callable[[], None] | None = None,
        arrived: bool = False,
    ) -> Passed:
        """Wait for all ranks, after which their earlier writes are visible. Every rank must call it.

        Args:
            what: The name of the wait in errors.
            step: Its deferred work is run if this rank has to wait. Ctrl-C sets its `interrupted`.
            meanwhile: Called once the others know that this rank has arrived; it may be called twice.
            arrived: True if `arrive` was called for this barrier.

        Returns:
            The number of the barrier, as proof that it has been passed.

        Raises:
            PeerError: If a rank has died or broken off, or does not arrive in time.
            KeyboardInterrupt: If Ctrl-C comes a second time.
        """
        if not arrived:
            self._barrier.arrive()
        try:
            if meanwhile is not None:
                meanwhile()
            self._wait(self._barrier, what, step)
        except KeyboardInterrupt:
            # The others may go on to write, and rely on this rank: so the step ends first, or fails. A second Ctrl-C
            # ends the wait.
            step.interrupted = True
            if meanwhile is not None:
                meanwhile()
            self._wait(self._barrier, what)
        self.barriers = passed = next(self._numbers)
        return passed

    def observed(self, place: int = 2) -> Observed:
        """Return a context in which this rank is seen to wait before the next barrier.

        Args:
            place: 1 for a wait until all ranks have begun the step, 2 for the barrier itself.
        """
        return Observed(Wait("Trainer.step", self.name, self.size, 2 * self.barriers + place))

    def release_gradients(self) -> None:
        """Signal to the other ranks that this rank has begun a call, and no longer reads the last step's gradient.

        Ranks must call it once in every call of the Trainer, even in one without gradients. Otherwise a rank in a step
        would wait for a rank that does something else, and the ranks would never compare what they do.
        """
        if self.awaits_release:
            self._release.arrive()

    def wait_for_release(self) -> None:
        """Wait until no rank reads the last step's gradient any more."""
        self._wait(self._release, "waiting for ranks to begin the step", place=1)

    def _wait(self, barrier: Barrier, what: str, step: StepTransaction | None = None, *, place: int = 2) -> None:
        """Wait until all ranks have arrived as often as this one.

        Unless a first poll finds that they have, deferred work is run, and unless a second one does, observers see the
        wait: the rank that arrives last keeps the others waiting, and does neither.
        """
        polling = self._polling
        polls = not polling.left
        is_late = barrier.late()
        if is_late and step is not None and step.deferred is not None:
            step.run_deferred()
            is_late = barrier.late()
        if not is_late:
            if not polls:
                polling.left -= 1
            elif polling.pause:  # quicker than a call
                polling.note(paid=True)
            return
        with self.observed(place):
            begun_s = time.monotonic()
            deadline_s = begun_s + self.timeout_s
            try:
                self._peer_wait.wait(barrier.late, barrier.wait, lambda: what, deadline_s=deadline_s, polls=polls)
            except DistBackendError as error:
                raise _lost(error) from error
        if polls:
            polling.note(paid=time.monotonic() - begun_s <= _WORTH_POLLING_S)
        else:
            polling.left -= 1

    def wait_for_semaphore(self, semaphore: Semaphore, rank: int, what: str) -> None:
        """Wait for a semaphore that another rank will post, and decrement it.

        Raises:
            PeerError: If that rank does not post it in time or has died, or if a rank has aborted.
        """
        taken = False

        def late() -> list[int]:
            nonlocal taken
            taken = taken or semaphore.try_wait()
            return [] if taken else [rank]

        def sleep(_: int, timeout_s: float) -> None:
            nonlocal taken
            taken = semaphore.wait(timeout_s)

        try:
            self._peer_wait.wait(late, sleep, lambda: what, deadline_s=time.monotonic() + self.timeout_s)
        except DistBackendError as error:
            raise _lost(error) from error

    def dead(self) -> list[int]:
        """List the other ranks whose process has ended."""
        return self._peers.dead()

    def abort(self, reason: str) -> None:
        """Make the other ranks raise where they wait."""
        self._peer_wait.abort(reason)

    def leave(self) -> None:
        """Make other ranks raise where they wait for this one, unless it has done its part of that already."""
        self._abort_flag.leave()

    @property
    def abort_reason(self) -> str | None:
        """The reason why ranks no longer agree; None while they do."""
        return self._abort_flag.reason

    def _look(self) -> None:
        """Raise DistBackendError if a rank has died or given up."""
        self._peer_wait.poll_abort()
        if dead := self._peers.dead():
            names = self._peer_wait.names(dead)
            self._peer_wait.give_up(f"making shared memory: the process of {names} has ended")

    def _handshake(
        self, make: Callable[[], Segment], look: Callable[[], None], *, keeps_descriptor: bool = False
    ) -> tuple[Segment, Peers]:
        self._handshakes += 1
        store, timeout_s = self.world.store(f"{self.name}/{self._handshakes}"), self.timeout_s
        return handshake(
            store,
            rank=self.rank,
            size=self.size,
            timeout_s=timeout_s,
            make=make,
            look=look,
            keeps_descriptor=keeps_descriptor,
        )


def _lost(error: DistBackendError) -> PeerError:
    """Return the error of a rank that waits for one that is lost."""
    return PeerError(
        f"{error}. The others cannot go on alone: start the job again; it resumes from the last checkpoint."
    )
