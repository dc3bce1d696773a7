"""Running a block on one rank before the others, for downloads and caches that all ranks use."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch.distributed as dist

from unisono.errors import PeerError
from unisono.job.current import active_job, current_job
from unisono.job.initialize import require_job
from unisono.job.ranks import world_size
from unisono.job.rejoin import is_new_rank
from unisono.job.store_exchange import wait_for_keys

__all__ = ["main_first"]

_around: ContextVar[str] = ContextVar("main_first", default="")
"""The enclosing blocks. Inner blocks are numbered separately: a rank that failed before them, and did not reach them,
then still agrees with the others on the number of the next block."""

_IN_CALL = "/call"
"""The name of a block whose end on the first rank is a call that is made again after ranks have been replaced."""


@contextmanager
def main_first(*, local: bool = False, timeout_s: float | None = None) -> Iterator[None]:
    """Run a with block on rank 0 first, then on the other ranks. Every rank must enter it.

    The first rank downloads and prepares files, which the others then find. If the block fails on the first rank, the
    others do not run it and fail too, at once. Ranks communicate over the job's store only.

    Args:
        local: Run the block on the first rank of every node first, for files that nodes do not share.
        timeout_s: How long the other ranks wait. None: the job's timeout.

    Raises:
        PeerError: The block failed on the first rank, or is not done in time; raised on the other ranks.
        ValueError: `timeout_s` is not a positive number.
        GroupError: The ranks have not met.

    Example:
        with unisono.main_first():
            data = datasets.MNIST("data", download=True)
    """
    if current_job() is None and world_size() == 1:
        _check_timeout(timeout_s)
        yield
        return
    around, active = _around.get(), active_job()
    calls = active.calls() if active is not None and not around else None
    if calls is not None or is_new_rank():
        _check_timeout(timeout_s)
    if is_new_rank() and calls is None:  # it takes the place of a rank that died, and the others have been here
        yield
        return
    job = require_job()
    is_first = (job.local_rank if local else job.rank) == 0
    turn = _Turn(
        block=_IN_CALL if calls is not None else f"{around}/{job.next_number(f'main_first{around}')}",
        node=job.node_rank if local else 0,
        who=f"the first rank of node {job.node_rank}" if local else "rank 0",
        timeout_s=timeout_s,
    )
    inside = _around.set(turn.block)
    done = False
    try:
        _check_timeout(timeout_s)
        if not is_first and (failure := turn.wait() if calls is None else calls.take_turn(turn.wait)):
            raise PeerError(failure)
        yield
        done = True
    finally:
        _around.reset(inside)
        if is_first:
            turn.failure = None if done else _describe()
            # The wait of the others and the end of this block are one call: a rank that takes the place of the first
            # one has done its block when it comes to the call, and the others then wait again.
            turn.end() if calls is None else calls.take_turn(turn.end)


def _check_timeout(timeout_s: float | None) -> None:
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and timeout_s > 0):
        raise ValueError(f"timeout_s={timeout_s!r} must be a positive number of seconds, or None for the job's timeout")


@dataclass(kw_only=True, slots=True)
class _Turn:
    """One block, on this rank."""

    block: str
    """Its name, equal on all ranks."""
    node: int
    who: str
    """The first rank, in words."""
    timeout_s: float | None
    failure: str | None = None
    """Why it failed on the first rank; None if it did not."""

    def wait(self, check: Callable[[], None] = lambda: None) -> str:
        """Wait until the first rank is done; return what is wrong if it failed, has ended, or is late, otherwise "".

        Args:
            check: Called while this rank waits; may raise.
        """
        (store, key), who = self._place(), self.who
        limit_s = self.timeout_s or require_job().timeout.total_seconds()
        try:
            done = wait_for_keys(store, [key], time.monotonic() + limit_s, check=check)
        except dist.DistError:
            return (
                f"{who} was not done with its block of main_first when rank 0's process ended, and with it the job's "
                "store: see what it printed"
            )
        if not done:
            return f"{who} was not done with its block of main_first after {limit_s:g} s: give a longer timeout_s"
        self.failure = json.loads(store.get(key))
        return self._told()

    def end(self, check: Callable[[], None] = lambda: None) -> str:
        """Tell the others that the first rank is done; see `wait`."""
        store, key = self._place()
        store.set(key, json.dumps(self.failure))
        check()  # otherwise this rank would notice only in a later call that others have died
        return self._told()

    def _told(self) -> str:
        if self.failure is None:
            return ""
        return f"{self.who} failed in its block of main_first, so this rank did not begin it: {self.failure}"

    def _place(self) -> tuple[dist.Store, str]:  # type: ignore[name-defined]
        job, block = require_job(), self.block
        if block == _IN_CALL:  # numbers begin anew when ranks have been replaced
            block = f"/{job.next_number('main_first')}"
        return job.store("main_first"), f"{block}/{self.node}"


def _describe() -> str:
    """Return a line with the current exception and its place."""
    kind, error, trace = sys.exc_info()
    assert kind is not None
    frames = traceback.extract_tb(trace)
    # The first frame is that of this file's generator, the second that of the block.
    where = f" ({frames[1].filename}:{frames[1].lineno})" if len(frames) > 1 else ""
    return f"{kind.__name__}: {error}{where}"
