"""`unisono top` in a job on several hosts: what the ranks of all hosts do, at the agent that is asked.

While a view is open on one host, the agent there asks all others every few seconds, and these show, once a second, what
their ranks do and use. What a host shows replaces what it has shown before, so a view may stay open for days. Start
reading at `HostActivity.describe`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from unisono.launch.answers import describe_activity
from unisono.launch.generation import Generation
from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.process_usage import read_usage

__all__ = ["HostActivity"]

_SHOW_S = 1.0
"""How often a host shows its ranks."""
_LEASE_S = 10.0
"""How long it does after it was asked."""
_PATIENCE_S = 3.0
"""How long a host may show nothing new before a view says so."""


class HostActivity:
    """The activity of the ranks of all hosts.

    Args:
        hosts: The other hosts.
        generation: Returns the ranks of this one; None before they have been started.
        progress: Returns what is known of the run on this host.
    """

    MESSAGES: Final = frozenset({"watch"})
    """The messages of agents about it."""

    def __init__(
        self,
        hosts: JobHosts,
        generation: Callable[[], Generation | None],
        progress: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._hosts, self._generation, self._progress = hosts, generation, progress
        self._asked_s = -math.inf
        self._until_s = -math.inf  # this host shows its ranks until then
        self._due_s = math.inf
        self._shown: dict[int, dict[str, Any]] = {}
        self._changed_s: dict[int, float] = {}

    @property
    def deadline_s(self) -> float | None:
        """When `tick` is due, by the monotonic clock; None: never."""
        return self._due_s if self._due_s < self._until_s else None

    def tick(self) -> None:
        """Show what the ranks of this host do, if it is due."""
        now_s = time.monotonic()
        if now_s < self._due_s or now_s >= self._until_s:
            return
        self._due_s = now_s + _SHOW_S
        ranks = [
            {**each, "usage": asdict(read_usage(each["pid"])), "at_s": now_s}
            for each in describe_activity(self._generation())
        ]
        self._hosts.show({"at_s": now_s, "ranks": ranks, "progress": dict(self._progress())})

    def on_said(self) -> None:
        """Show the ranks of this host from now on: another one has asked."""
        if self._hosts.reaches_all:
            now_s = time.monotonic()
            if now_s >= self._until_s:
                self._due_s = now_s
            self._until_s = now_s + _LEASE_S

    def on_shown(self, shown: Mapping[str, dict[str, Any]]) -> None:
        """Take note of what hosts have shown."""
        for host, told in shown.items():
            if told["at_s"] != self._shown.get(int(host), {}).get("at_s"):
                self._shown[int(host)], self._changed_s[int(host)] = told, time.monotonic()

    def describe(self) -> dict[str, Any]:
        """Return what is known of the ranks of all hosts, and ask for more, which is there at the next call.

        Returns:
            "activity", with the host and the usage of ranks on other hosts; "silent", a sentence for each host that
            shows nothing new; and what is known of the run.
        """
        hosts, now_s = self._hosts, time.monotonic()
        assert hosts.place is not None
        if now_s >= self._asked_s + _LEASE_S / 2:
            if now_s >= self._asked_s + _LEASE_S:
                self._changed_s = dict.fromkeys(hosts.hosts, now_s)  # nobody has looked: they have not been asked
            self._asked_s = now_s
            hosts.say({"do": "watch"})
        hosts.look()
        activity = [{**each, "host": hosts.place.host} for each in describe_activity(self._generation())]
        progress, silent = dict(self._progress()), []
        for host in hosts.hosts:
            told = self._shown.get(host)
            if host == hosts.place.host:
                continue
            if now_s - self._changed_s.setdefault(host, now_s) > _PATIENCE_S:
                silent.append(f"{hosts.name(host)}, has shown nothing new for {now_s - self._changed_s[host]:.0f} s")
            if told is None:
                continue
            activity += [{**each, "host": host} for each in told["ranks"]]
            if progress.get("step") is None:  # the events of a run come from rank 0
                progress |= told["progress"]
        activity.sort(key=lambda each: int(each["rank"]))
        return {**progress, "activity": activity, "silent": silent, "hosts": len(hosts.hosts)}
