"""The election of the next leader once one is lost: hosts turn to those that are left, in the order of their numbers.

The first that can be reached counts who has come, and tells them whether all of them go on (`launch.hosts.quorum`).
Start reading at `Election.run`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from unisono.launch.hosts.guarded_port import LocalPort
from unisono.launch.hosts.quorum import find_obstacle, succession
from unisono.launch.hosts.settings import HostSettings
from unisono.launch.hosts.term import STORE_ERRORS

__all__ = ["Election", "Verdict", "silence"]

_PAUSE_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The decision of a new leader."""

    leader: int
    obstacle: str
    """Why the hosts that have come must not go on; "" if they may."""
    members: tuple[int, ...]
    """The hosts that have come, with the leader."""
    lost: dict[int, str]
    """By number, what has happened to the others."""


def silence(settings: HostSettings) -> str:
    """Return what is said of a host that does not answer."""
    return f"has not answered for {settings.host_timeout_s:g} s: it, or the link to it, is down"


class Election:
    """The election of the leader of a term, as one host takes part in it.

    Args:
        number: The number of the term.
        host: This host.
        members: The hosts of the job.
        known: The latest members that all of them are known to know.
        lost: By number, what has happened to the hosts that are lost, the former leader among them.
        ended: Those that are known to have ended.
        settings: Where hosts meet.
        open_way: Opens a way to the store of a host. Returns its end on this host, and the way unless that is this
            host itself.
        connect: Opens a connection to a store, with a prefix and a timeout in seconds.
        has_ended: Returns True if a host that has closed a connection refuses others.
    """

    def __init__(
        self,
        number: int,
        *,
        host: int,
        members: Collection[int],
        known: Collection[int],
        lost: dict[int, str],
        ended: Collection[int],
        settings: HostSettings,
        open_way: Callable[[int], tuple[tuple[str, int], LocalPort | None]],
        connect: Callable[[tuple[str, int], str, float], Any],
        has_ended: Callable[[int], bool],
    ) -> None:
        self._prefix = f"vote/{number}"
        self._host, self._members, self._known = host, set(members), set(known)
        self._lost, self._ended = dict(lost), set(ended)
        self._settings = settings
        self._open_way, self._connect, self._has_ended = open_way, connect, has_ended

    def run(self) -> Verdict | None:
        """Return the verdict of the first host that leads; None if none can be reached."""
        for candidate in succession(self._members, lost=self._lost):
            verdict = self._count_votes() if candidate == self._host else self._vote(candidate)
            if verdict is not None:
                return verdict
        return None

    def _count_votes(self) -> Verdict:
        """Wait for the hosts that want this one as their leader; decide, and tell them, whether all go on."""
        where, _ = self._open_way(self._host)
        store = self._connect(where, self._prefix, self._settings.host_timeout_s)
        waiting = self._members - self._lost.keys() - {self._host}
        deadline_s = time.monotonic() + self._settings.host_timeout_s + 1.0
        while waiting and time.monotonic() < deadline_s:
            waiting = {host for host in waiting if not store.check([f"here/{host}"])}
            time.sleep(_PAUSE_S)
        members = sorted(self._members - self._lost.keys() - waiting)
        verdict = Verdict(
            leader=self._host,
            obstacle=find_obstacle(
                self._known, reachable=members, ended=self._ended, min_hosts=self._settings.min_hosts
            ),
            members=tuple(members),
            lost={**self._lost, **dict.fromkeys(waiting, silence(self._settings))},
        )
        told = {"obstacle": verdict.obstacle, "members": members, "lost": [*verdict.lost.items()]}
        store.set("verdict", json.dumps(told))
        return verdict

    def _vote(self, candidate: int) -> Verdict | None:
        """Ask a host to lead, and return its verdict; None if it is lost, too."""
        where, way = self._open_way(candidate)
        limit_s = self._settings.host_timeout_s
        try:
            store = self._connect(where, self._prefix, limit_s)
            store.set(f"here/{self._host}", "1")
            # It waits for others that may be lost, too.
            store.wait(["verdict"], timedelta(seconds=2 * limit_s + 2.0))
            told = json.loads(store.get("verdict"))
        except STORE_ERRORS:
            self._lost[candidate] = silence(self._settings)
            if way is not None and way.has_ended and self._has_ended(candidate):
                self._ended.add(candidate)
            return None
        return Verdict(
            leader=candidate, obstacle=told["obstacle"], members=tuple(told["members"]), lost=dict(told["lost"])
        )
