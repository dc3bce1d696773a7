"""The hosts that have come to the rendezvous so far. Start reading at `Arrivals`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from unisono.launch.hosts.host_settings import HostSettings

__all__ = ["Arrivals"]

_POLL_S = 0.2


class Arrivals:
    """The hosts that have come to the endpoint: shown while more are waited for, and named if these do not come.

    Use it as a context: within it, a thread follows who comes.
    """

    def __init__(
        self, store: Any, settings: HostSettings, hello: Mapping[str, Any], *, notice: Callable[[str], None]
    ) -> None:
        self._store, self._settings, self._notice = store, settings, notice
        self._prefix = f"unisono/came/{settings.run_id}"
        self._names: list[str] = [hello["name"]]
        self._over = threading.Event()
        number = store.add(f"{self._prefix}/count", 1)
        store.set(f"{self._prefix}/{number}", json.dumps(hello["name"]))
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5.0)

    def too_few(self, wanted: int) -> str:
        """Return the message for too few hosts."""
        return (
            f"{len(self._names)} of {wanted} hosts came to {self._settings.endpoint} within "
            f"{self._settings.join_timeout_s:g} s: {', '.join(self._names)}; start the others with the same "
            f"--rdzv-endpoint and --rdzv-id ({self._settings.run_id}), or give a smaller --nnodes"
        )

    def closed(self) -> str:
        """Return the message for an endpoint that is gone before all have come."""
        return (
            f"the rendezvous at {self._settings.endpoint} has ended, perhaps because its time was over; "
            f"{len(self._names)} of {self._settings.min_hosts} hosts had come: {', '.join(self._names)}"
        )

    def _follow(self) -> None:
        with suppress(RuntimeError, ValueError):  # the endpoint is gone, which the rendezvous shows
            while not self._over.wait(_POLL_S):
                numbers = range(1, self._store.add(f"{self._prefix}/count", 0) + 1)
                keys = [key for number in numbers if self._store.check([key := f"{self._prefix}/{number}"])]
                names = list(dict.fromkeys(json.loads(self._store.get(key)) for key in keys))
                if names != self._names:
                    self._names = names
                    self._notice(
                        f"unisono: {len(names)} of {self._settings.min_hosts} hosts at {self._settings.endpoint} ..."
                    )
