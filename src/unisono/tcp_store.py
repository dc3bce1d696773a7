"""Torch's TCPStore: at an address that the program has chosen, hosted by rank 0, or by the launcher.

On this machine's loopback address it listens on that address alone. `open_store` is used by `launch.rendezvous_patch`
and `job.rendezvous`, `serve_store` by the launcher's processes. Start reading at `open_store`.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from unisono.name_lookups import answered_here

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["LOCAL_HOSTS", "LOOPBACK", "make_store", "open_store", "serve_store"]

LOOPBACK = "127.0.0.1"
LOCAL_HOSTS = ("localhost", LOOPBACK)
"""Names that programs may use for this machine's loopback address."""


def open_store(
    host: str, port: int, rank: int, world_size: int, *, timeout: timedelta, use_libuv: bool = True
) -> TCPStore:
    """Open the store at an address: rank 0 hosts it, the other ranks connect to it.

    Args:
        host: The host of rank 0.
        port: A port of that host. Only a store of this process may use it already.
        rank: The number of this process, from 0.
        world_size: The number of processes.
        timeout: How long to wait for rank 0, and in the store's own operations.
        use_libuv: True for torch's server with libuv, False for its other one.

    Raises:
        torch.distributed.DistError: Rank 0 does not host the store in time, or cannot.
    """
    host = LOOPBACK if host in LOCAL_HOSTS else host
    with ExitStack() as stack:
        listener = _listen(port) if rank == 0 and host == LOOPBACK else None
        if listener is not None:
            stack.enter_context(listener)
        store = make_store(
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
            listener.detach()  # the store owns it now
        return store


def _listen(port: int) -> socket.socket | None:
    """Return a listener on the loopback address; None if the port is taken: by a store of ours, or torch raises."""
    listener = socket.socket()
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, port))
        listener.listen(socket.SOMAXCONN)
        return listener
    listener.close()
    return None


def serve_store(address: str, listener: socket.socket) -> TCPStore:
    """Serve a store on a listener, which it owns from now on; return it, a client of itself as well.

    Args:
        address: Where the listener can be reached.
        listener: A socket that listens.
    """
    return make_store(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
        use_libuv=True,
    )


def make_store(host: str, port: int, world_size: int | None = None, **options: Any) -> TCPStore:
    """Make a TCPStore with torch's options. No name server is asked for the names of addresses."""
    # Not at the top: the launcher's side is imported before torch.
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

    with answered_here(host):
        return TCPStore(host, port, world_size, **options)
