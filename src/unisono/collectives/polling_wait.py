"""Waiting for a transfer between ranks of one host without paying for a sleep.

A thread that sleeps until gloo's thread wakes it loses some 0.1 ms each time, on virtual machines more: half of what a
short all-reduce takes. So a wait begins by polling, where every rank has a core to itself, and only as long as that
pays. Start reading at `PollingWait`.
"""

from __future__ import annotations

import os
import time

import torch.distributed as dist

from unisono.polling import Backoff

__all__ = ["PollingWait"]


class PollingWait:
    """Waits for works of a process group on the CPU, polling first where that has paid lately.

    Polling that does not see the end, because the transfer is long or the core is wanted, is left out for the next
    waits: for twice as many each time.

    Args: polls is whether to poll at all: where ranks share cores, polling takes the core that a peer needs to end the
        transfer. poll_s is how long at most.
    """

    def __init__(self, *, polls: bool, poll_s: float = 0.003) -> None:
        self._polls, self._poll_s = polls, poll_s
        self._backoff = Backoff()

    def wait(self, work: dist.Work) -> None:
        """Wait for the end of a work. Raises: RuntimeError if it failed, as `Work.wait` does."""
        if self._polls and not work.is_completed():
            if self._backoff.left:
                self._backoff.left -= 1
            else:
                self._backoff.note(paid=self._poll(work))
        work.wait()

    def _poll(self, work: dist.Work) -> bool:
        """Poll for a while. Returns: whether the work ended meanwhile."""
        end_s = time.perf_counter() + self._poll_s
        while not work.is_completed():
            if time.perf_counter() > end_s:
                return False
            os.sched_yield()
        return True
