"""The store at which hosts meet: served by the host of the endpoint, awaited and reached by the others.

Start reading at `open_door`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.guarded_port import GuardedPort, LocalPort
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.shared_token import TokenError, introduce, sends_greeting
from unisono.tcp_store import serve_store

__all__ = ["Door", "HostRefusedError", "guard_store", "listen", "open_door"]

_PAUSE_S = 0.1
_PATIENCE_S = 3.0
"""How long an endpoint may be unreachable before a line says that it is waited for."""


class HostRefusedError(Exception):
    """Hosts cannot form a job; the message is for the user."""


def listen(address: str, port: int) -> socket.socket:
    """Return a listener on one address of this host; "" for all.

    Raises:
        OSError: The port is in use, or the address is not of this host.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def guard_store(listener: socket.socket, port: int, token: str, *, warn: Callable[[str], None]) -> None:
    """Let those who know the token reach a store on the loopback address by a listener, and name others to the user."""
    GuardedPort(
        listener,
        port,
        token,
        refused=lambda stranger: warn(f"refused a connection from {stranger}, which does not know the token"),
    )


@dataclass(frozen=True, slots=True)
class Door:
    """The address at which this host finds the store of the endpoint."""

    address: str
    port: int
    store: Any
    """The store itself, if this process serves it."""


def open_door(
    settings: HostSettings,
    addresses: HostAddresses,
    *,
    notice: Callable[[str], None],
    warn: Callable[[str], None],
    deadline_s: float,
) -> Door:
    """Serve the store of the endpoint if this host is it, or wait until it can be reached."""
    port = settings.endpoint_port
    if addresses.hosts_endpoint:
        address = addresses.listen or addresses.local
        try:
            listener = listen(addresses.listen, port)
        except OSError as error:
            if settings.backend == "static":
                raise HostRefusedError(
                    f"port {port} of {address} cannot be used: {error.strerror}; another job may use it: give another "
                    "--rdzv-endpoint or --master-port on all hosts"
                ) from error
            # Another agent of this machine may serve it, as torchrun's do.
        else:
            if not settings.token:
                return Door(address, port, serve_store(address, listener))
            store = serve_store("127.0.0.1", listen("127.0.0.1", 0))
            guard_store(listener, store.port, settings.token, warn=warn)
            return Door("127.0.0.1", store.port, store)
    address = addresses.endpoint
    _reach(settings, address, notice=notice, deadline_s=deadline_s)
    if settings.token:
        return Door("127.0.0.1", LocalPort((address, port), settings.token).port, None)
    return Door(address, port, None)


def _reach(settings: HostSettings, address: str, *, notice: Callable[[str], None], deadline_s: float) -> None:
    """Wait until the endpoint can be reached, and see whether it has the same token, or none as well."""
    since_s, told, where = (
        time.monotonic(),
        False,
        f"{settings.endpoint_host} ({address}), port {settings.endpoint_port}",
    )
    while True:
        try:
            with socket.create_connection((address, settings.endpoint_port), timeout=5.0) as connection:
                if settings.token:
                    introduce(connection, settings.token)
                elif sends_greeting(connection):
                    raise HostRefusedError(
                        f"the rendezvous at {where}, asks for a token: copy that host's, and give --rdzv-token-file"
                    )
                return
        except TokenError as error:
            raise HostRefusedError(f"the rendezvous at {where}, {error}") from error
        except OSError as error:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                reason = error.strerror or str(error)
                raise HostRefusedError(
                    f"no rendezvous at {where}, within {settings.join_timeout_s:g} s: {reason}; start `unisono run` on "
                    "that host with the same --rdzv-endpoint, and let the port through its firewall"
                ) from error
            if not told and now_s - since_s > _PATIENCE_S:
                told = True
                notice(f"unisono: waiting for {settings.endpoint} ({error.strerror or error}) ...")
        time.sleep(_PAUSE_S)
