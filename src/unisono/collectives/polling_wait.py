"""Waits for transfers between ranks of one host that poll before they sleep.

A thread that sleeps until gloo's thread wakes it loses some 0.1 ms each time, more on virtual machines: half the time
of a short all-reduce. So where every rank has its own core, a wait begins by polling, as long as that pays. Start
reading at `PollingWait`.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from unisono.activity import Observed, TimedWait, Wait, waited
from unisono.collectives.freed_wait import wait_for_collective, wait_for_message
from unisono.polling import Backoff

__all__ = ["PollingWait"]


class PollingWait:
    """Waits for works of a process group on the CPU, polling first if that has paid lately.

    If polling does not see the end, because the transfer is long or another thread needs the core, the next waits skip
    it: twice as many each time.

    Args:
        polls: True to poll at all. Where ranks share cores, polling takes the core that a peer needs for the transfer.
        poll_s: Seconds to poll at most.
    """

    def __init__(self, *, polls: bool, poll_s: float = 0.003) -> None:
        self._polls, self._poll_s = polls, poll_s
        self._backoff = Backoff()

    def wait(self, work: dist.Work, seen: Wait | None = None) -> None:
        """Wait for the end of a work.

        Args:
            work: The work.
            seen: How observers see a wait for a message that polling does not end. None for a collective, which the
                backend's record has, or for anything on a GPU, where a wait ends at once.

        Raises:
            PeerError: The launcher replaces or ends ranks.
            RuntimeError: The work failed, as in `Work.wait`.
        """
        if waited.is_on and not work.is_completed():
            with TimedWait(waited):
                self._wait(work, seen)
        else:
            self._wait(work, seen)

    def _wait(self, work: dist.Work, seen: Wait | None) -> None:
        if self._polls and not work.is_completed():
            if self._backoff.left:
                self._backoff.left -= 1
            else:
                self._backoff.note(paid=self._poll(work))
        if seen is None:
            wait_for_collective(work)
        elif work.is_completed():
            work.wait()
        else:
            with Observed(seen):
                wait_for_message(work)

    def _poll(self, work: dist.Work) -> bool:
        """Poll for at most `poll_s`. Return True if the work has ended."""
        end_s = time.perf_counter() + self._poll_s
        while not work.is_completed():
            if time.perf_counter() > end_s:
                return False
            os.sched_yield()
        return True
