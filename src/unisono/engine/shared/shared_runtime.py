"""Where the ranks of one host meet to train in shared memory: its segments, and the places at which they wait.

One Trainer has one hall. Bells (`shm.semaphore`) publish what ranks write; a rank that dies, or breaks off in the
middle of a step, makes the others raise within a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch.distributed import DistBackendError

from unisono.activity import Observed, Wait
from unisono.collectives.world import World
from unisono.errors import PeerError
from unisono.machine import usable_cores
from unisono.shm.abort_flag import AbortFlag
from unisono.shm.handshake import died_in_handshake, handshake
from unisono.shm.peer_wait import PeerWait
from unisono.shm.peers import Newcomers, Peers
from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["Barrier", "SharedRuntime"]

_WORDS = 8

# A wait that lasts longer gained nothing by polling, or others want the core: then each look costs a time slice, and a
# sleeper is woken sooner. So the next waits, up to so many, begin asleep.
_WORTH_POLLING_S = 0.001
_LONGEST_PAUSE = 256


class Barrier:
    """A place that every rank reports at, again and again, and where it may wait until all others have reported too."""

    def __init__(self, segment: Segment, offset: int, peers: Peers) -> None:
        size, rank = peers.size, peers.rank
        self._others = [r for r in range(size) if r != rank]
        self._outgoing = [
            Semaphore(segment.address + offset + (rank * size + r) * SEMAPHORE_NBYTES) for r in self._others
        ]
        self._incoming = {
            r: Semaphore(segment.address + offset + (r * size + rank) * SEMAPHORE_NBYTES) for r in self._others
        }
        self._heard = dict.fromkeys(self._others, 0)
        self._reported = 0

    def report(self) -> None:
        """Tell all others that this rank has come here once more, and show them what it wrote before."""
        self._reported += 1
        for bell in self._outgoing:
            bell.ring()

    def late(self) -> list[int]:
        """List the ranks that have reported less often than this one."""
        late = []
        for rank in self._others:
            while self._heard[rank] < self._reported:
                if not self._incoming[rank].try_take():
                    late.append(rank)
                    break
                self._heard[rank] += 1
        return late

    def listen(self, rank: int, timeout_s: float) -> None:
        """Sleep until a rank reports, at most so long."""
        if self._incoming[rank].take(timeout_s):
            self._heard[rank] += 1


class SharedRuntime:
    """The shared memory of a Trainer on one host. Every rank must build it, and make its collective calls in one order.

    Args: name is one that no other hall of this job has. processes are those of all ranks, as `own_process`
        describes them. How long ranks wait for each other is the job's affair.
    """

    def __init__(self, world: World, name: str, processes: Sequence[str]) -> None:
        self.world, self.name, self._timeout_s = world, name, world.timeout_s
        self.rank, self.size = world.rank, world.size
        self._meetings = 0
        bells = aligned(self.size**2 * SEMAPHORE_NBYTES)
        alarm_nbytes = aligned(AbortFlag.nbytes(self.size))
        words_offset = alarm_nbytes + 2 * bells

        def make() -> Segment:
            segment = Segment.create(words_offset + 8 * _WORDS * self.size, name="unisono trainer")
            AbortFlag.create(segment, 0, self.size)
            for gate_offset in (alarm_nbytes, alarm_nbytes + bells):
                for i in range(self.size**2):
                    Semaphore(segment.address + gate_offset + i * SEMAPHORE_NBYTES).create()
            return segment

        with Newcomers() as newcomers:
            for rank, process in enumerate(processes):
                if rank != self.rank:
                    newcomers.add(rank, process)

            def look() -> None:
                if dead := newcomers.dead():
                    raise PeerError(died_in_handshake(dead))

            segment, self._peers = self._meet(make, look)
        self._alarm = AbortFlag(segment, 0, rank=self.rank, size=self.size)
        self._waiting = PeerWait(
            self._alarm,
            self._peers,
            ranks=range(self.size),
            group="of the Trainer",
            timeout_s=self._timeout_s,
            polls=self.size <= usable_cores(),
        )
        self._barrier = Barrier(segment, alarm_nbytes, self._peers)
        self._freed = Barrier(segment, alarm_nbytes + bells, self._peers)
        self.frees = False
        """Whether some engine waits until nobody reads the last step's gradient."""
        self._words = memoryview(segment.memory)[words_offset : words_offset + 8 * _WORDS * self.size].cast("q")
        self._pause = self._unpolled = 0
        self.barriers = 0
        """How many barriers have been passed."""
        self.interrupted = False
        """Whether Ctrl-C came at a barrier, and its exception is owed still."""

    def show(self, word: int, number: int) -> None:
        """Write one of this rank's few numbers, which the others see after the next barrier."""
        self._words[self.rank * _WORDS + word] = number

    def shown(self, word: int) -> list[int]:
        """Read that number of each rank."""
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
            segment, peers = self._meet(make, look=self._look)
        peers.close()
        return segment

    def report(self) -> None:
        """Tell all others that this rank has come to the next barrier, and show them what it wrote before."""
        self._barrier.report()

    def barrier(
        self,
        what: str,
        *,
        meanwhile: Callable[[], None] | None = None,
        idle: Callable[[], None] | None = None,
        reported: bool = False,
    ) -> None:
        """Wait for all ranks, and see all that they wrote before. Every rank must call it.

        Args: meanwhile is done when the others know that this rank has come; it may be done twice. idle is done if this
            rank has to wait for them. reported is whether `report` was called for this barrier.
        Raises: PeerError if a rank has died, or broken off, or does not come in time.
        """
        if not reported:
            self._barrier.report()
        with Observed(self._described(2)):
            try:
                if meanwhile is not None:
                    meanwhile()
                self.wait(self._barrier, lambda: what, idle)
            except KeyboardInterrupt:
                # The others may go on to write, and count on this rank: so the step ends first, or fails. A second
                # Ctrl-C ends the wait.
                self.interrupted = True
                if meanwhile is not None:
                    meanwhile()
                self.wait(self._barrier, lambda: what)
        self.barriers += 1

    def free(self) -> None:
        """Tell all others that this rank has begun a call, and so reads the last step's gradient no more.

        Ranks do so once in every call, also in one without gradients: else a rank that takes a step would wait here for
        one that does something else, and none would ever compare what they do.
        """
        if self.frees:
            self._freed.report()

    def wait_until_free(self) -> None:
        """Wait until nobody reads the last step's gradient any more."""
        with Observed(self._described(1)):
            self.wait(self._freed, lambda: "waiting for ranks to begin the step")

    def wait(self, gate: Barrier, what: Callable[[], str], idle: Callable[[], None] | None = None) -> None:
        """Wait until all ranks have reported at a gate as often as this one. Args: idle is done if some have not."""
        if not self._unpolled and not gate.late():
            self._pause = 0
            return
        if idle is not None:
            idle()
        begun_s = time.monotonic()
        polls = not self._unpolled
        with self._explained():
            self._waiting.wait(gate.late, gate.listen, what, deadline_s=begun_s + self._timeout_s, polls=polls)
        if not polls:
            self._unpolled -= 1
        elif time.monotonic() - begun_s > _WORTH_POLLING_S:
            self._pause = self._unpolled = min(2 * self._pause + 1, _LONGEST_PAUSE)
        else:
            self._pause = 0

    def take(self, bell: Semaphore, rank: int, what: str) -> None:
        """Wait for a bell that a rank will ring, and take it. Raises: PeerError if it does not, or has died."""
        taken = False

        def late() -> list[int]:
            nonlocal taken
            taken = taken or bell.try_take()
            return [] if taken else [rank]

        def listen(_: int, timeout_s: float) -> None:
            nonlocal taken
            taken = bell.take(timeout_s)

        with self._explained():
            self._waiting.wait(late, listen, lambda: what, deadline_s=time.monotonic() + self._timeout_s)

    def break_off(self, reason: str) -> None:
        """Make the other ranks raise where they wait."""
        self._waiting.tell(reason)

    @property
    def broken(self) -> str | None:
        """Why ranks no longer agree; None while they do."""
        return self._waiting.broken

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
        self._waiting.look()
        if dead := self._peers.dead():
            names = self._waiting.names(dead)
            self._waiting.give_up(f"making shared memory: the process of {names} has ended")

    def _meet(self, make: Callable[[], Segment], look: Callable[[], None]) -> tuple[Segment, Peers]:
        self._meetings += 1
        store = self.world.store(f"{self.name}/{self._meetings}")
        return handshake(store, rank=self.rank, size=self.size, timeout_s=self._timeout_s, make=make, look=look)
