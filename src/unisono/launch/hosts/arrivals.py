"""The hosts that have come to the rendezvous so far. Start reading at `Arrivals`."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from unisono.launch.hosts.guarded_port import refuses
from unisono.launch.hosts.host_settings import HostSettings

__all__ = ["Arrivals"]

_POLL_S = 0.2


class Arrivals:
    """The hosts that have come to the endpoint: shown while more are waited for, and named if these do not come.

    Use it as a context: within it, a thread follows who comes.
    """

    def __init__(
        self,
        store: Any,
        settings: HostSettings,
        hello: Mapping[str, Any],
        *,
        notice: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._store, self._settings, self._notice, self._warn = store, settings, notice, warn
        least, most = settings.min_hosts, settings.max_hosts
        self._wanted = f"{least}" if least == most else f"{least} to {most}"
        self._prefix = f"unisono/came/{settings.run_id}"
        self._number: int = store.add(f"{self._prefix}/count", 1)
        facts = {name: hello[name] for name in ("name", "address", "store") if name in hello}
        store.set(f"{self._prefix}/{self._number}", json.dumps(facts))
        self._came: dict[int, dict[str, Any]] = {self._number: facts}
        self._ended: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Arrivals:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(5.0)

    def find_ended(self) -> set[int]:
        """Return which of the hosts that came have ended, each by the number of its arrival. It may have come anew."""
        came = self._came
        newest = {facts["name"]: number for number, facts in sorted(came.items()) if "store" in facts}
        others = set(newest.values()) - self._ended - {self._number}
        return {each for each in others if refuses((came[each]["address"], came[each]["store"]), timeout_s=1.0)}

    def forget(self, ended: Iterable[int]) -> None:
        """Do not count these hosts any more, by the numbers of their arrivals, and say so."""
        ended = set(ended) - self._ended
        self._ended |= ended
        names = sorted({self._came[number]["name"] for number in ended if number in self._came})
        if names:
            what = "its launcher has" if len(names) == 1 else "their launchers have"
            self._warn(f"{', '.join(names)}: {what} ended before all hosts had met; waiting for others")

    def too_few(self, wanted: int) -> str:
        """Return the message for too few hosts."""
        names = self._names()
        return (
            f"{len(names)} of {wanted} hosts came to {self._settings.endpoint} within "
            f"{self._settings.join_timeout_s:g} s: {', '.join(names)}; start the others with the same "
            f"--rdzv-endpoint and --rdzv-id ({self._settings.run_id}), or give a smaller --nnodes"
        )

    def closed(self) -> str:
        """Return the message for an endpoint that is gone before all have met."""
        names = self._names()
        return (
            f"the rendezvous at {self._settings.endpoint} has ended before all hosts had met: the launcher there was "
            f"killed, or waits no longer; {len(names)} of {self._wanted} hosts had come: {', '.join(names)}"
        )

    def _names(self) -> list[str]:
        return list(dict.fromkeys(facts["name"] for number, facts in self._came.items() if number not in self._ended))

    def _follow(self) -> None:
        shown = 1
        with suppress(RuntimeError, ValueError):  # the endpoint is gone, which the rendezvous shows
            while not self._over.wait(_POLL_S):
                numbers = range(1, self._store.add(f"{self._prefix}/count", 0) + 1)
                new = [each for each in numbers if each not in self._came]
                keys = {each: key for each in new if self._store.check([key := f"{self._prefix}/{each}"])}
                self._came = {**self._came, **{each: json.loads(self._store.get(key)) for each, key in keys.items()}}
                if (count := len(self._names())) != shown:
                    shown = count
                    self._notice(f"unisono: {count} of {self._wanted} hosts at {self._settings.endpoint} ...")
