"""Waits for operations of torch.distributed that end if the rank they wait for is lost.

What a Trainer awaits over a process group, it awaits here. Operations of gloo are freed by `job.connection_watch`;
those of the backend shm notice a lost rank themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from unisono.job.current import connection_watch

__all__ = ["run_collective", "start_collective", "wait_for_collective", "wait_for_message"]


def run_collective(operation: Callable[..., dist.Work | None], *args: Any, **kwargs: Any) -> None:
    """Run a collective of torch.distributed to its end.

    Args:
        operation: The function of torch.distributed.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Raises:
        PeerError: The launcher replaces or ends ranks.
        RuntimeError: The collective failed.
    """
    if connection_watch() is None:
        operation(*args, **kwargs)
    elif (work := operation(*args, async_op=True, **kwargs)) is not None:
        wait_for_collective(work)


def start_collective(operation: Callable[..., dist.Work | None], *args: Any, **kwargs: Any) -> dist.Work:
    """Start a collective of torch.distributed, of a group that this rank is in; see `wait_for_collective`.

    Args:
        operation: The function of torch.distributed.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    work = operation(*args, async_op=True, **kwargs)
    assert work is not None, "this rank is in the group"
    return work


def wait_for_collective(work: dist.Work) -> None:
    """Wait for a collective. Raises what `run_collective` does."""
    watch = connection_watch()
    if watch is None or type(work) is not dist.Work:
        work.wait()
    else:
        watch.wait_for_collective(work)


def wait_for_message(work: dist.Work) -> None:
    """Wait for a send or a receive. Raises what `run_collective` does."""
    watch = connection_watch()
    if watch is None or type(work) is not dist.Work:
        work.wait()
    else:
        watch.wait_for_message(work)
