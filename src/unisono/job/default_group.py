"""Makes torch.distributed's default group from a rendezvous, closes its connections, and makes groups of its ranks."""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unisono.errors import GroupError, LaunchError
from unisono.job.group_watch import abort_is_survived
from unisono.job.rendezvous import Rendezvous

__all__ = ["Sockets", "close_connections", "make_group", "make_subgroup"]


Sockets = frozenset[tuple[int, int]]
"""Open sockets of this process, each as its descriptor and its inode."""


def make_group(backend: str, meeting: Rendezvous, timeout: timedelta, device: torch.device) -> Sockets:
    """Make the default group. Every rank must call it.

    Returns:
        The connections of the group.

    Raises:
        LaunchError: Torch could not make it.
    """
    before = _open_sockets()
    try:
        if backend == "mpi":  # mpi numbers the ranks
            dist.init_process_group("mpi", timeout=timeout)
            return frozenset()
        with abort_is_survived(backend):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("default_pg", meeting.store),  # type: ignore[attr-defined]
                rank=meeting.rank,
                world_size=meeting.world_size,
                timeout=timeout,
                device_id=device if backend == "nccl" else None,
            )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {meeting.rank} of {meeting.world_size} could not make a group by {backend!r}: {error}"
        ) from error
    return _open_sockets() - before


def make_subgroup(ranks: Sequence[int], *, timeout: timedelta, backend: str | None = None) -> dist.ProcessGroup | None:
    """Make a group of some ranks, which it numbers in this order. Every rank must call it.

    Args:
        ranks: The global ranks of the members.
        timeout: How long its operations wait.
        backend: None: that of the default group.

    Returns:
        The group on its members, None on other ranks.

    Raises:
        GroupError: The ranks are not ascending, and this version of torch cannot keep their order.
    """
    asked = list(ranks)
    ordered: dict[str, Any] = {}
    if asked != sorted(asked):
        if "sort_ranks" not in signature(dist.new_group).parameters:
            raise GroupError(
                f"a group of the ranks {asked} in this order needs torch 2.13, and this is torch {torch.__version__}, "
                "which sorts them: list them in ascending order"
            )
        ordered = {"sort_ranks": False}
    with _unbound() if backend is not None and "nccl" not in backend else nullcontext():
        made = dist.new_group(asked, timeout=timeout, backend=backend, **ordered)
    return made if isinstance(made, dist.ProcessGroup) else None


@contextmanager
def _unbound() -> Iterator[None]:
    """Let the default group be bound to no device.

    Of a group that is bound to a GPU, torch splits NCCL's communicator for each new group. That waits for all ranks,
    and those in a new group of another backend would not come. It also asks the new group for its backend for GPUs.
    """
    default: Any = dist.group.WORLD
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


def close_connections(sockets: Sockets) -> None:
    """Close the connections of a group for all processes that hold them.

    Data workers have inherited them, so they would stay open when this process closes its own descriptors.
    """
    for file, _ in sockets & _open_sockets():
        with suppress(OSError), socket.socket(fileno=os.dup(file)) as end:  # the other end may have closed it
            # Not the socket on which gloo listens: it aborts the process if that ends.
            if not end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                end.shutdown(socket.SHUT_RDWR)


def _open_sockets() -> Sockets:
    found = []
    for name in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else ():
        with suppress(OSError):  # the descriptor of the listing
            status = os.fstat(int(name.name))
            if stat.S_ISSOCK(status.st_mode):
                found.append((int(name.name), status.st_ino))
    return frozenset(found)
