"""How a rank waits for others: by polling while that is cheap, then asleep, and not for the dead.

Where every rank has a core, a wait begins with polling: being woken costs more than a small collective takes. Else a
poll would take the core that a peer needs to go on. A sleep is cut into slices, and after each the rank looks whether
a peer has died, left or given up.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from torch.distributed import DistBackendError

from unisono.shm.abort_flag import AbortFlag
from unisono.shm.peers import Peers
from unisono.text import name_ranks

__all__ = ["PeerWait", "let_others_run"]

_SLICE_S = 0.05
"""Asleep at most so long without a look at the peers."""
_POLL_S = 0.003
"""Polling where each rank has a core. Longer waits are those for a rank that computes."""
_TRIES = 3
"""Looks before the sleep where ranks share cores."""

# The one of os keeps the interpreter's lock before Python 3.12, and other threads of this rank would stand still.
let_others_run = ctypes.CDLL(None).sched_yield


class PeerWait:
    """Waits for ranks of a group. Any thread may use it.

    Args: ranks are the global ranks of the group, for people: errors name them. group is its name. timeout_s is how
        long a wait lasts at most where the call says nothing else. polls is whether each rank has a core to itself.
    """

    def __init__(
        self, abort_flag: AbortFlag, peers: Peers, *, ranks: Sequence[int], group: str, timeout_s: float, polls: bool
    ) -> None:
        self._abort_flag, self._peers = abort_flag, peers
        self._ranks, self._group = tuple(ranks), group
        self.timeout_s = timeout_s
        self.polls = polls
        self.timed_out = False
        """True once this rank has given up because others did not come in time."""

    @property
    def broken(self) -> str | None:
        """Why the group is of no use any more; None while it is."""
        return self._abort_flag.reason

    @property
    def own_name(self) -> str:
        """Name this process's rank."""
        return self.names([self._peers.rank])

    def check(self) -> None:
        """Raise DistBackendError if the group is known to be broken."""
        if self._abort_flag.reason is not None:
            raise DistBackendError(self._again(self._abort_flag.reason))

    def poll_abort(self) -> None:
        """Read what the peers have posted now. Raises: DistBackendError if one has aborted the group."""
        self._abort_flag.poll()
        self.check()

    def poll(self, late: Callable[[], Collection[int]], for_s: float = _POLL_S) -> bool:
        """Look again and again, where ranks have cores of their own, else a few times. Returns: whether none is late.

        Args: late lists the ranks that are awaited still; none ends the wait.
        """
        if not self.polls:
            for _ in range(_TRIES):
                if not late():
                    return True
                let_others_run()
            return not late()
        end_s = time.perf_counter() + for_s
        while late():
            if time.perf_counter() > end_s:
                return False
            let_others_run()
        return True

    def wait(
        self,
        late: Callable[[], Sequence[int]],
        wait_for: Callable[[int, float], object],
        what: Callable[[], str],
        *,
        deadline_s: float,
        timeout_s: float | None = None,
        every: bool = True,
        polls: bool = True,
    ) -> None:
        """Wait until no rank is late.

        Args: late lists the ranks (in the group) that are awaited still. wait_for(rank, seconds) sleeps until something
            comes from the first of them, at most so long. what returns what is being done, for the error's text.
            deadline_s is on time.monotonic's clock; timeout_s is how long that was, for people. every is whether all
            of them are needed: False if any would do, and then it is an error only if all have left, or one was killed.
            polls is whether to begin with polling.
        Raises: DistBackendError if the time is over, a rank that is awaited has ended or left, or the group is broken.
            The group is broken then, for all ranks.
        """
        if polls and self.poll(late):
            return
        look_s = time.monotonic() + _SLICE_S
        while missing := late():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                within = "in time" if timeout_s is None else f"within {timeout_s:g} s"
                does = "it does" if len(missing) == 1 else "they do"
                self.timed_out = True
                # "timed out" are the words by which programs, torch's tests and filters of logs know a timeout.
                self.give_up(
                    f"{what()} timed out: {self.names(missing)} did not take part {within}; see what {does} instead"
                )
            if now_s >= look_s:
                look_s = now_s + _SLICE_S
                if self._nobody_comes(late, what, every=every):
                    return
            wait_for(missing[0], min(_SLICE_S, deadline_s - now_s))

    def abort(self, reason: str) -> None:
        """Break the group, for all ranks."""
        self._abort_flag.abort(reason)

    def give_up(self, reason: str) -> NoReturn:
        """Break the group, for all ranks, and raise DistBackendError."""
        self._abort_flag.abort(reason)
        raise DistBackendError(self._named(reason))

    def names(self, ranks: Collection[int]) -> str:
        """Name ranks of the group by their global numbers."""
        return name_ranks(self._ranks[r] for r in ranks)

    def _nobody_comes(self, late: Callable[[], Sequence[int]], what: Callable[[], str], *, every: bool) -> bool:
        """Look for ranks that have ended, left or aborted. Return True if what was awaited has come after all."""
        dead = set(self._peers.dead())
        self._abort_flag.poll()
        left, reason = self._abort_flag.left, self._abort_flag.reason
        # What they did before their end counts, so look once more now that they can do nothing more.
        missing = late()
        if not missing:
            return True
        if reason is not None:
            raise DistBackendError(self._named(reason))
        gone = [r for r in missing if r in dead or r in left]
        killed = [r for r in gone if r not in left]  # a program that ends leaves its groups first
        if killed or len(gone) >= (1 if every else len(missing)):
            if killed:
                self.give_up(f"{what()}: the process of {self.names(killed)} has ended")
            self.give_up(f"{what()}: the group was left by {self.names(gone)}, whose program ends or destroyed it")
        return False

    def _named(self, reason: str) -> str:
        return f"[rank {self._ranks[self._peers.rank]}, group {self._group}] {reason}"

    def _again(self, reason: str) -> str:
        return f"{self._named(reason).removesuffix('.')}. The group cannot be used any more: make a new one"
