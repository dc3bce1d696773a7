"""Running a block on one rank before the others, for downloads and caches that all ranks use."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch.distributed as dist

from unisono.errors import PeerError
from unisono.job.current import current_job
from unisono.job.initialize import require_job
from unisono.job.ranks import world_size
from unisono.job.rejoin import is_new_rank
from unisono.job.rendezvous import wait_for

__all__ = ["main_first"]

_around: ContextVar[str] = ContextVar("main_first", default="")
"""The enclosing blocks. Inner blocks are numbered separately: a rank that failed before them, and did not reach them,
then still agrees with the others on the number of the next block."""


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
    if is_new_rank():  # it takes the place of a rank that died, and the others have been here
        _check_timeout(timeout_s)
        yield
        return
    job = require_job()
    store = job.store("main_first")
    node = job.node_rank if local else 0
    around = _around.get()
    block = f"{around}/{job.next_number(f'main_first{around}')}"
    key = f"{block}/{node}"
    first = (job.local_rank if local else job.rank) == 0
    inside = _around.set(block)
    done = False
    try:
        _check_timeout(timeout_s)
        if not first:
            limit_s = job.timeout.total_seconds() if timeout_s is None else timeout_s
            _wait_for_turn(store, key, limit_s, who=f"the first rank of node {node}" if local else "rank 0")
        yield
        done = True
    finally:
        _around.reset(inside)
        if first:
            store.set(key, json.dumps(None if done else _describe()))


def _check_timeout(timeout_s: float | None) -> None:
    number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (number and timeout_s > 0):
        raise ValueError(f"timeout_s={timeout_s!r} must be a positive number of seconds, or None for the job's timeout")


def _wait_for_turn(store: dist.Store, key: str, limit_s: float, *, who: str) -> None:  # type: ignore[name-defined]
    """Wait until the first rank is done; PeerError if it failed, has ended, or is late."""
    try:
        done = wait_for(store, [key], time.monotonic() + limit_s)
    except dist.DistError as error:
        raise PeerError(
            f"{who} was not done with its block of main_first when rank 0's process ended, and with it the job's "
            "store: see what it printed"
        ) from error
    if not done:
        raise PeerError(f"{who} was not done with its block of main_first after {limit_s:g} s: give a longer timeout_s")
    failure = json.loads(store.get(key))
    if failure is not None:
        raise PeerError(f"{who} failed in its block of main_first, so this rank did not begin it: {failure}")


def _describe() -> str:
    """Return a line with the current exception and its place."""
    kind, error, trace = sys.exc_info()
    assert kind is not None
    frames = traceback.extract_tb(trace)
    # The first frame is that of this file's generator, the second that of the block.
    where = f" ({frames[1].filename}:{frames[1].lineno})" if len(frames) > 1 else ""
    return f"{kind.__name__}: {error}{where}"
