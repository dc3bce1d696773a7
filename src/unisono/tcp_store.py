"""A TCPStore at an address that the program has chosen, hosted by rank 0; on this machine's loopback address it
listens there alone. Used by `launch.rendezvous_patch` and `job.rendezvous`. Start reading at `open_store`.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["LOCAL_HOSTS", "LOOPBACK", "open_store"]

LOOPBACK = "127.0.0.1"
LOCAL_HOSTS = ("localhost", LOOPBACK)
"""Names under which a program may write this machine's loopback address."""


def open_store(
    host: str, port: int, rank: int, world_size: int, *, timeout: timedelta, use_libuv: bool = True
) -> TCPStore:
    """Open the store at an address: rank 0 hosts it, the others connect to it.

    Args:
        host: the host of rank 0.
        port: a port there; only a store of this process may be there already.
        rank: the number of this process, from 0.
        world_size: how many processes will come.
        timeout: how long to wait for rank 0, and in the store's own operations.
        use_libuv: which of torch's two servers hosts it.

    Returns: the store.

    Raises: torch.distributed.DistError if rank 0 does not host it in time, or cannot.
    """
    # Not at the top: the launcher's side is there before torch is.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    host = LOOPBACK if host in LOCAL_HOSTS else host
    with ExitStack() as stack:
        listener = _listen(port) if rank == 0 and host == LOOPBACK else None
        if listener is not None:
            stack.enter_context(listener)
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            multi_tenant=True,
            use_libuv=use_libuv,
            master_listen_fd=None if listener is None else listener.fileno(),
        )
        if listener is not None:
            listener.detach()  # the store has it now
        return store


def _listen(port: int) -> socket.socket | None:
    """Listen on the loopback address only. None if the port is taken: by a store of ours, or torch will say by whom."""
    listener = socket.socket()
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(socket.SOMAXCONN)
        return listener
    listener.close()
    return None
