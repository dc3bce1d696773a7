"""The store that each host of a job serves, and connections to those of others. Start reading at `OwnStore`."""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch import distributed as dist

from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.endpoint import listen
from unisono.launch.hosts.guarded_port import GuardedPort, LocalPort
from unisono.machine import host_id
from unisono.tcp_store import LOOPBACK, make_store, serve_store

__all__ = ["OwnStore", "connect", "way_to"]


class OwnStore:
    """The store of this host, which has the log while this host leads.

    Args:
        addresses: The addresses of this host.
        token: The secret of the job; "" for none.
        ranks: The number of ranks of this host.
        flags: The flags that all hosts must be given alike, with this host's values.
    """

    def __init__(self, addresses: HostAddresses, token: str, *, ranks: int, flags: Mapping[str, str]) -> None:
        if token:
            self._store = serve_store(LOOPBACK, listen(LOOPBACK, 0))
            guarded = listen(addresses.local, 0)
            port: int = guarded.getsockname()[1]
            GuardedPort(guarded, self._store.port, token, refused=lambda _: None)
        else:
            self._store = serve_store(addresses.local, listen(addresses.local, 0))
            port = self._store.port
        self.address = (LOOPBACK if token else addresses.local), self._store.port
        """Where this host finds it."""
        self.hello: dict[str, Any] = {
            "name": f"{socket.gethostname()} ({addresses.local})",
            "address": addresses.local,
            "store": port,
            "system": host_id(with_network=True),
            "pid": os.getpid(),
            "ranks": ranks,
            "nonce": secrets.token_hex(8),
            "flags": dict(flags),
            "versions": {
                "unisono": version("unisono"),
                "torch": str(torch.__version__),
                "Python": ".".join(platform.python_version_tuple()[:2]),
            },
        }
        """The facts that this host gives about itself."""


def way_to(hello: Mapping[str, Any], token: str) -> LocalPort:
    """Open a way to the store of the host that says this of itself."""
    return LocalPort((hello["address"], hello["store"]), token)


def connect(where: tuple[str, int], prefix: str, *, timeout_s: float = 10.0) -> Any:
    """Connect to the store of a host. Keys begin with the prefix."""
    store = make_store(*where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return dist.PrefixStore(f"unisono/{prefix}", store)  # type: ignore[attr-defined]
