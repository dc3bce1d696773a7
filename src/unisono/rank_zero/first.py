"""One rank goes first, the others follow: for downloads and caches that all ranks use."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.comm.job import current_job
from unisono.comm.meeting import wait_for
from unisono.comm.ranks import world_size
from unisono.comm.start import require_job
from unisono.errors import PeerError

__all__ = ["main_first"]


@contextmanager
def main_first(*, local: bool = False, timeout_s: float | None = None) -> Iterator[None]:
    """Let rank 0 run the block first; the other ranks run it when rank 0 is done. Every rank must come there.

    The first rank downloads and prepares, the others find what is there. If the block fails on the first rank, the
    others do not run it and fail too, at once.
    Args: local lets the first rank of every node go first, for files that nodes do not share. timeout_s is how long the
        others wait; None is the job's timeout.
    Raises: PeerError on the others, with the error of the first rank, or if it is not done in time.

    Example:
        with unisono.main_first():
            data = datasets.MNIST("data", download=True)
    """
    if current_job() is None and world_size() == 1:
        yield
        return
    job = require_job()
    store = job.store("main_first")
    node = job.node_rank if local else 0
    key = f"{job.next_number('main_first')}/{node}"
    if (job.local_rank if local else job.rank) == 0:
        done = False
        try:
            yield
            done = True
        finally:
            store.set(key, json.dumps(None if done else _describe()))
        return
    limit_s = job.timeout.total_seconds() if timeout_s is None else timeout_s
    who = f"the first rank of node {node}" if local else "rank 0"
    if not wait_for(store, [key], time.monotonic() + limit_s):
        raise PeerError(f"{who} was not done with its block of main_first after {limit_s:g} s: give a longer timeout_s")
    failure = json.loads(store.get(key))
    if failure is not None:
        raise PeerError(f"{who} failed in its block of main_first, so this rank did not begin it: {failure}")
    yield


def _describe() -> str:
    """Say in a line what is being raised, and where."""
    kind, error, trace = sys.exc_info()
    assert kind is not None
    frames = traceback.extract_tb(trace)
    # The first frame is the generator's own, the second the block.
    where = f" ({frames[1].filename}:{frames[1].lineno})" if len(frames) > 1 else ""
    return f"{kind.__name__}: {error}{where}"
