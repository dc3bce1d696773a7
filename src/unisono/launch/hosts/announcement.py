"""The leader of a running job tells hosts that come late where it is, and answers them.

Hosts come to the endpoint. So the leader's greeting is written into the store there, again whenever another store has
begun there: the host of the endpoint may have been lost, and come back. If nothing is at the endpoint, the leader
serves a store at the same port of its own host. Hosts that read the greeting knock at the leader's own store. The other
side is `launch.hosts.late_host`. Start reading at `Announcement`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.endpoint import guard_store, listen
from unisono.launch.hosts.guarded_port import LocalPort
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.own_store import connect
from unisono.launch.hosts.shared_token import TokenError, introduce
from unisono.launch.hosts.term import STORE_ERRORS
from unisono.tcp_store import LOOPBACK, serve_store

__all__ = ["KNOCK", "Announcement", "running_prefix"]

KNOCK = "knock"
_PAUSE_S = 1.0
_FOREVER = timedelta(days=365)


def running_prefix(settings: HostSettings) -> str:
    """Return the prefix of the key `leader` in the store at the endpoint, where the leader's greeting is."""
    return f"running/{settings.run_id}"


class Announcement:
    """Tells where the leader is, and answers those that come there, until it is closed.

    Args:
        hello: The greeting of the leader.
        own: Where this host finds its own store.
        admit: Returns the answer to a host that knocks with this greeting.
        say: Called with a sentence for the user: where hosts can come instead of the endpoint, and who was refused.
    """

    def __init__(
        self,
        settings: HostSettings,
        addresses: HostAddresses,
        *,
        hello: Mapping[str, Any],
        own: tuple[str, int],
        admit: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._addresses, self._hello, self._own = settings, addresses, hello, own
        self._admit, self._say = admit, say
        self._over = threading.Event()
        self._servers: list[Any] = []
        for body in (self._announce, self._answer):
            threading.Thread(target=body, name="unisono-hosts-announce", daemon=True).start()

    def close(self) -> None:
        """Announce no more: the job is about to end."""
        self._over.set()

    def _answer(self) -> None:
        with suppress(*STORE_ERRORS):  # this process ends
            store, number = connect(self._own, KNOCK), 0
            store.set_timeout(_FOREVER)
            while not self._over.is_set():
                number += 1
                hello = json.loads(store.get(str(number)))  # waits for it
                store.set(f"{number}/answer", json.dumps(self._admit(hello)))

    def _announce(self) -> None:
        told, failures = json.dumps(self._hello), 0
        store: Any = None
        way: LocalPort | None = None
        while not self._over.wait(_PAUSE_S if failures or store is not None else 0.0):
            try:
                if store is None:
                    where, way = self._find()
                    store = connect(where, running_prefix(self._settings))
                store.set("leader", told)
                store.check(["leader"])  # to set is not answered
                failures = 0
            except STORE_ERRORS:
                store, failures = None, failures + 1
                if way is not None:
                    way.close()
                if failures == 2 and not self._servers and not self._addresses.hosts_endpoint:
                    self._serve(told)
        if store is not None:
            with suppress(*STORE_ERRORS):
                store.delete_key("leader")

    def _find(self) -> tuple[tuple[str, int], LocalPort | None]:
        """Return where the store of the endpoint is reached.

        Raises:
            OSError: Nothing is there, or nothing that knows the token.
        """
        port, token = self._settings.endpoint_port, self._settings.token
        try:
            with socket.create_connection((self._addresses.endpoint, port), timeout=2.0) as probe:
                if token:
                    introduce(probe, token)
        except (OSError, TokenError) as error:
            raise ConnectionError(str(error)) from error
        if token:
            way = LocalPort((self._addresses.endpoint, port), token)
            return (LOOPBACK, way.port), way
        return (self._addresses.endpoint, port), None

    def _serve(self, told: str) -> None:
        """Serve a store with the greeting in place of that of the endpoint, at its port of this host."""
        address, port, token = self._addresses.local, self._settings.endpoint_port, self._settings.token
        try:
            listener = listen(address, port)
        except OSError:  # another job uses it
            return
        if token:
            store = serve_store(LOOPBACK, listen(LOOPBACK, 0))
            guard_store(listener, store.port, token, warn=self._say)
        else:
            store = serve_store(address, listener)
        self._servers.append(store)
        here = LOOPBACK if token else address
        connect((here, store.port), running_prefix(self._settings)).set("leader", told)
        self._say(f"nothing answers at {self._settings.endpoint}; hosts can join at {address}:{port} now")
