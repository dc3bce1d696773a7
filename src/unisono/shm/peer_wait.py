"""Waiting for other ranks: by polling while that is cheap, then asleep, and never for ranks that have died.

If every rank has a core, a wait begins with polling, because a wake-up takes longer than a small collective. Otherwise
polling would occupy the core that a peer needs to continue. A sleep is divided into slices, and after each the rank
checks whether a peer has died, left or given up.
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

_SLICE_S = 0.01
"""The longest sleep without a check of the peers, and so the longest time until a death is noticed."""
_POLL_S = 0.003
"""How long to poll if each rank has a core. Longer waits are for a rank that computes."""
_TRIES = 3
"""The number of polls before the sleep if ranks share cores."""

# os.sched_yield keeps the GIL before Python 3.12, which would block the other threads of this rank.
let_others_run = ctypes.CDLL(None).sched_yield


class PeerWait:
    """Waits for ranks of a group. Thread-safe.

    Args:
        abort_flag: The abort flags of the group.
        peers: The processes of the group.
        ranks: The global ranks of the group, by which errors name ranks.
        group: The name of the group.
        timeout_s: The default timeout of a call.
        polls: True if each rank has a core to itself.
    """

    def __init__(
        self, abort_flag: AbortFlag, peers: Peers, *, ranks: Sequence[int], group: str, timeout_s: float, polls: bool
    ) -> None:
        self._abort_flag, self._peers = abort_flag, peers
        self._ranks, self._group = tuple(ranks), group
        self.timeout_s = timeout_s
        self.polls = polls
        self.timed_out = False
        """True once `wait` has timed out on this rank."""

    @property
    def broken(self) -> str | None:
        """Why the group can no longer be used; None while it can."""
        return self._abort_flag.reason

    @property
    def own_name(self) -> str:
        """The name of this process's rank."""
        return self.names([self._peers.rank])

    def check(self) -> None:
        """Raise DistBackendError if the group is known to be aborted."""
        if self._abort_flag.reason is not None:
            raise DistBackendError(self._again(self._abort_flag.reason))

    def poll_abort(self) -> None:
        """Read the flags of the peers, and raise DistBackendError if one has aborted the group."""
        self._abort_flag.poll()
        self.check()

    def poll(self, late: Callable[[], Collection[int]], for_s: float = _POLL_S) -> bool:
        """Poll for `for_s` if each rank has a core, otherwise a few times. Return True if no rank is late any more.

        `late` returns the ranks that are still awaited.
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
        part_with: Callable[[Collection[int], DistBackendError], None] | None = None,
    ) -> None:
        """Wait until no rank is late.

        Args:
            late: Returns the ranks (in the group) that are still awaited.
            wait_for: Called as `wait_for(rank, seconds)` with the first of them; sleeps until something comes from it,
                for at most that time.
            what: Returns a description of the operation, for errors.
            deadline_s: When the wait times out, by `time.monotonic`.
            timeout_s: The timeout, for errors.
            every: True if all of the ranks are needed, False if any one is enough. It is then an error only if all have
                left, or one was killed.
            polls: True to begin with polling.
            part_with: Called with awaited ranks that have left, and the error that says so: nobody awaits them
                afterwards. None: that ends the wait by this error.

        Raises:
            DistBackendError: The wait timed out, an awaited rank has ended or left, or the group is aborted. The group
                is then aborted on all ranks.
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
                if self._raise_if_peers_ended(late, what, every=every, part_with=part_with):
                    return
            wait_for(missing[0], min(_SLICE_S, deadline_s - now_s))

    def abort(self, reason: str) -> None:
        """Abort the group on all ranks."""
        self._abort_flag.abort(reason)

    def give_up(self, reason: str) -> NoReturn:
        """Abort the group on all ranks, and raise DistBackendError."""
        self._abort_flag.abort(reason)
        raise DistBackendError(self._named(reason))

    def names(self, ranks: Collection[int]) -> str:
        """Return the names of ranks of the group, by their global numbers."""
        return name_ranks(self._ranks[r] for r in ranks)

    def _raise_if_peers_ended(
        self,
        late: Callable[[], Sequence[int]],
        what: Callable[[], str],
        *,
        every: bool,
        part_with: Callable[[Collection[int], DistBackendError], None] | None,
    ) -> bool:
        """Raise if awaited ranks have ended, left or aborted. Return True if no rank is late any more."""
        dead = set(self._peers.dead())
        self._abort_flag.poll()
        left, reason = self._abort_flag.left, self._abort_flag.reason
        # Anything that they did before they ended counts, so check once more, now that they can do nothing more.
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
            reason = f"{what()}: the group was left by {self.names(gone)}, whose program ends or destroyed it"
            if part_with is None:
                self.give_up(reason)
            part_with(gone, DistBackendError(self._named(reason)))
            return not late()
        return False

    def _named(self, reason: str) -> str:
        return f"[rank {self._ranks[self._peers.rank]}, group {self._group}] {reason}"

    def _again(self, reason: str) -> str:
        return f"{self._named(reason).removesuffix('.')}. The group cannot be used any more: make a new one"
