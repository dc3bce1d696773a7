"""What the ranks of one host train by in shared memory: segments, barriers, and the notice that a step was aborted.

One Trainer has one of these. Semaphores (`shm.semaphore`) publish what ranks write; a rank that dies, or breaks off in
the middle of a step, makes the others raise within a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import cast

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

# A wait that lasts longer gained nothing by polling, or others want the core: then each look costs a time slice, and a
# sleeper is woken sooner. So the next waits begin asleep.
_WORTH_POLLING_S = 0.001


class Barrier:
    """A place that every rank arrives at, again and again, and where it may wait until all others have arrived too."""

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
        """Tell all others that this rank has come here once more, and publish what it wrote before."""
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
        """Sleep until a rank arrives, at most so long."""
        if self._incoming[rank].wait(timeout_s):
            self._seen[rank] += 1


class SharedRuntime:
    """The shared memory of a Trainer on one host. Every rank must build it, and make its collective calls in one order.

    Args: name is one that no other runtime of this job has. processes are those of all ranks, as `own_process`
        describes them. How long ranks wait for each other is the job's affair.
    """

    def __init__(self, world: World, name: str, processes: Sequence[str]) -> None:
        self.world, self.name, self._timeout_s = world, name, world.timeout_s
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
            ranks=range(self.size),
            group="of the Trainer",
            timeout_s=self._timeout_s,
            polls=self.size <= usable_cores(),
        )
        self._barrier = Barrier(segment, flag_nbytes, self._peers)
        self._release = Barrier(segment, flag_nbytes + barrier_nbytes, self._peers)
        self.awaits_release = False
        """Whether some engine waits until nobody reads the last step's gradient."""
        self._words = memoryview(segment.memory)[words_offset : words_offset + 8 * _WORDS * self.size].cast("q")
        self._polling = Backoff()
        self._numbers = cast(Iterator[Passed], count(1))
        self.barriers = Passed(0)
        """How many barriers have been passed."""

    def publish(self, word: int, number: int) -> None:
        """Write one of this rank's few numbers, which the others see after the next barrier."""
        self._words[self.rank * _WORDS + word] = number

    def published(self, word: int, passed: Passed) -> list[int]:
        """Return that number of each rank, as it was at the barrier passed last."""
        assert passed == self.barriers, "ranks may have published other numbers since"
        return self._words[word::_WORDS].tolist()

    def segment(self, nbytes: int, what: str, *, prepare: Callable[[Segment], None] | None = None) -> Segment:
        """Make memory that all ranks share, all zero. Every rank must call it, with equal arguments.

        Args: what is for people who look at /proc/PID/maps. prepare writes to it, on one rank, before others have it.
        """

        def make() -> Segment:
            segment = Segment.create(nbytes, name=f"unisono {what}")
            if prepare is not None:
                prepare(segment)
            return segment

        with self._explained():
            segment, peers = self._handshake(make, look=self._look)
        peers.close()
        return segment

    def arrive(self) -> None:
        """Tell all others that this rank has come to the next barrier, and publish what it wrote before."""
        self._barrier.arrive()

    def barrier(
        self,
        what: str,
        step: StepTransaction,
        *,
        meanwhile: Callable[[], None] | None = None,
        arrived: bool = False,
    ) -> Passed:
        """Wait for all ranks, and see all that they wrote before. Every rank must call it.

        Args:
            what: What this rank waits for, for errors.
            step: Its deferred work is done if this rank has to wait. If Ctrl-C comes, it owes the exception.
            meanwhile: Done when the others know that this rank has come; it may be done twice.
            arrived: True if `arrive` was called for this barrier.

        Returns:
            The number of the barrier, as proof that it has been passed.

        Raises:
            PeerError: If a rank has died, or broken off, or does not come in time.
        """
        if not arrived:
            self._barrier.arrive()
        with Observed(self._described(2)):
            try:
                if meanwhile is not None:
                    meanwhile()
                self.wait(self._barrier, lambda: what, step)
            except KeyboardInterrupt:
                # The others may go on to write, and count on this rank: so the step ends first, or fails. A second
                # Ctrl-C ends the wait.
                step.interrupted = True
                if meanwhile is not None:
                    meanwhile()
                self.wait(self._barrier, lambda: what)
        self.barriers = passed = next(self._numbers)
        return passed

    def release_gradients(self) -> None:
        """Tell all others that this rank has begun a call, and so reads the last step's gradient no more.

        Ranks do so once in every call, also in one without gradients. Otherwise a rank that takes a step would wait
        here for one that does something else, and none would ever compare what they do.
        """
        if self.awaits_release:
            self._release.arrive()

    def wait_for_release(self) -> None:
        """Wait until nobody reads the last step's gradient any more."""
        with Observed(self._described(1)):
            self.wait(self._release, lambda: "waiting for ranks to begin the step")

    def wait(self, barrier: Barrier, what: Callable[[], str], step: StepTransaction | None = None) -> None:
        """Wait until all ranks have arrived at a barrier as often as this one; if some have not, run the deferred."""
        polling = self._polling
        polls = not polling.left
        if polls and not barrier.late():
            if polling.pause:  # quicker than a call
                polling.note(paid=True)
            return
        if step is not None:
            step.run_deferred()
        begun_s = time.monotonic()
        with self._explained():
            self._peer_wait.wait(barrier.late, barrier.wait, what, deadline_s=begun_s + self._timeout_s, polls=polls)
        if polls:
            polling.note(paid=time.monotonic() - begun_s <= _WORTH_POLLING_S)
        else:
            polling.left -= 1

    def wait_for_semaphore(self, semaphore: Semaphore, rank: int, what: str) -> None:
        """Wait for a semaphore that a rank will post, and take it. Raises: PeerError if it does not, or has died."""
        taken = False

        def late() -> list[int]:
            nonlocal taken
            taken = taken or semaphore.try_wait()
            return [] if taken else [rank]

        def sleep(_: int, timeout_s: float) -> None:
            nonlocal taken
            taken = semaphore.wait(timeout_s)

        with self._explained():
            self._peer_wait.wait(late, sleep, lambda: what, deadline_s=time.monotonic() + self._timeout_s)

    def abort(self, reason: str) -> None:
        """Make the other ranks raise where they wait."""
        self._peer_wait.abort(reason)

    @property
    def abort_reason(self) -> str | None:
        """Why ranks no longer agree; None while they do."""
        return self._peer_wait.broken

    def _described(self, place: int) -> Wait:
        """Describe a wait: before the n-th barrier, the second, ranks wait until all have begun the step."""
        return Wait("Trainer.step", self.name, self.size, 2 * self.barriers + place)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DistBackendError as error:
            raise PeerError(
                f"{error}. The others cannot go on alone: start the job again; it resumes from the last checkpoint."
            ) from error

    def _look(self) -> None:
        """Raise if a rank has died or given up."""
        self._peer_wait.poll_abort()
        if dead := self._peers.dead():
            names = self._peer_wait.names(dead)
            self._peer_wait.give_up(f"making shared memory: the process of {names} has ended")

    def _handshake(self, make: Callable[[], Segment], look: Callable[[], None]) -> tuple[Segment, Peers]:
        self._handshakes += 1
        store = self.world.store(f"{self.name}/{self._handshakes}")
        return handshake(store, rank=self.rank, size=self.size, timeout_s=self._timeout_s, make=make, look=look)
