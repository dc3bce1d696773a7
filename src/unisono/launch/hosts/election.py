"""The election of the next leader once one is lost: hosts turn to those that are left, in the order of their numbers.

The first that can be reached counts who has come, and tells them whether all of them go on (`launch.hosts.quorum`).
Start reading at `Election.run`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from unisono.launch.hosts.guarded_port import LocalPort
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.own_store import connect
from unisono.launch.hosts.quorum import succession
from unisono.launch.hosts.roster import Roster
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
        roster: The hosts of the job.
        lost: By number, what has happened to the hosts that are lost, the former leader among them.
        settings: Where hosts meet.
        open_way: Opens a way to the store of a host. Returns its end on this host, and the way unless that is this
            host itself.
        has_ended: Returns True if a host that has closed a connection refuses others.
    """

    def __init__(
        self,
        number: int,
        *,
        host: int,
        roster: Roster,
        lost: dict[int, str],
        settings: HostSettings,
        open_way: Callable[[int], tuple[tuple[str, int], LocalPort | None]],
        has_ended: Callable[[int], bool],
    ) -> None:
        self._prefix = f"vote/{number}"
        self._host, self._roster, self._lost = host, roster, dict(lost)
        self._settings = settings
        self._open_way, self._has_ended = open_way, has_ended

    def run(self) -> Verdict | None:
        """Return the verdict of the first host that leads; None if none can be reached."""
        for candidate in succession(self._roster.members, lost=self._lost):
            verdict = self._count_votes() if candidate == self._host else self._vote(candidate)
            if verdict is not None:
                return verdict
        return None

    def _count_votes(self) -> Verdict:
        """Wait for the hosts that want this one as their leader; decide, and tell them, whether all go on."""
        where, _ = self._open_way(self._host)
        store = connect(where, self._prefix, timeout_s=self._settings.host_timeout_s)
        waiting = self._roster.members - self._lost.keys() - {self._host}
        deadline_s = time.monotonic() + self._settings.host_timeout_s + 1.0
        while waiting and time.monotonic() < deadline_s:
            waiting = {host for host in waiting if not store.check([f"here/{host}"])}
            time.sleep(_PAUSE_S)
        members = sorted(self._roster.members - self._lost.keys() - waiting)
        verdict = Verdict(
            leader=self._host,
            obstacle=self._roster.obstacle(members, min_hosts=self._settings.min_hosts),
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
            store = connect(where, self._prefix, timeout_s=limit_s)
            store.set(f"here/{self._host}", "1")
            # It waits for others that may be lost, too.
            store.wait(["verdict"], timedelta(seconds=2 * limit_s + 2.0))
            told = json.loads(store.get("verdict"))
        except STORE_ERRORS:
            self._lost[candidate] = silence(self._settings)
            if way is not None and way.has_ended and self._has_ended(candidate):
                self._roster.ended.add(candidate)
            return None
        return Verdict(
            leader=candidate, obstacle=told["obstacle"], members=tuple(told["members"]), lost=dict(told["lost"])
        )
