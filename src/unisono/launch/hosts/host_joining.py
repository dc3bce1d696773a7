"""A host joins a job that runs: one that comes late, or comes back. The others keep the state, and send it.

The newcomer starts its ranks, which run the script up to its Trainer, while the others work. Then all ranks come to the
end of a step and wait there, as for `unisono scale`. Since no host may ask its ranks for that before the ranks of all
hosts would wait, the leader first lets all write down what is wanted, and then asks. When all wait, it decides who the
ranks are, and all meet as after a death. Until then the newcomer can be lost, and nothing happens to the others.

What hosts tell each other: `invite` (the newcomer's ranks), its `ready`, `want` and the answers `wants`, `pause` and
the answers `waits`, then the decision (`launch.hosts.host_replacing`); or `withdraw`, or `turn away`. Start reading at
`HostJoining.on_said`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from unisono.launch.generation import Generation
from unisono.launch.hosts.host_scaling import HostScaling
from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.hosts.rank_places import ranks_for_newcomer
from unisono.launch.output.relay import Relay
from unisono.launch.replacement_policy import Member
from unisono.recovery_link import SAME_SIZE
from unisono.text import name_ranks
from unisono.watch.figures import plural

__all__ = ["HostJoining"]

_POLL_S = 0.01
_RETRY_S = 0.5
"""How soon to look again whether the ranks have made a Trainer, before which no host can join."""


class HostJoining:
    """The hosts that join a job, as one of its agents sees them.

    Args:
        hosts: The other hosts.
        generation: The ranks of this one.
        scaling: The changes of the number of ranks, which come about in the same way.
        ask: Asks all agents about their ranks; `plan` and `may_join` are called with the answers. For the leader.
        waits: Returns True if a rank has joined the others and waits between two steps.
    """

    def __init__(
        self,
        hosts: JobHosts,
        generation: Generation,
        relay: Relay,
        *,
        scaling: HostScaling,
        ask: Callable[[], None],
        waits: Callable[[int], bool],
    ) -> None:
        self._hosts, self._generation, self._relay, self._ask, self._waits = hosts, generation, relay, ask, waits
        self._scaling = scaling
        self._wanted = 0  # what is to be written into the pages
        self._is_told = False  # the leader knows that it is
        self._are_asked = False
        self._told_waits = False
        self._told_ready = False
        self._expected: set[int] = set()  # hosts that are about to join
        # On the leader:
        self.newcomer: int | None = None
        """The host that joins at present."""
        self.ranks: list[int] = []
        """Its ranks; or those that come to hosts when the number of ranks changes."""
        self._state: Literal["new", "invited", "wanting", "pausing", "decided"] = "new"
        self._brings: set[int] = set()  # hosts that start processes for these, and are not ready yet
        self._came: set[int] = set()  # hosts that have answered
        self._retry_s: float | None = None

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is due, by the monotonic clock; None if nothing is under way."""
        is_busy = self._wanted or (self._starts and not self._told_ready)
        return time.monotonic() + _POLL_S if is_busy else self._retry_s

    def tick(self) -> None:
        """Do what is due."""
        ranks = self._generation.ranks
        waits = [self._waits(rank) for rank in ranks] if self._wanted else []
        if self._starts and not self._told_ready and all(map(self._is_ready, self._starts)):
            self._told_ready = True
            self._hosts.say_to_leader({"do": "ready"})
        if self._wanted and not self._is_told and not any(waits):  # otherwise some still wait from the time before
            self._is_told = True
            self._generation.want(self._wanted, asks=False)
            self._hosts.say_to_leader({"do": "wants", "number": self._wanted})
        if self._are_asked and all(waits) != self._told_waits:
            self._told_waits = all(waits)
            self._hosts.say_to_leader({"do": "waits", "yes": all(waits)})
        if self._retry_s is not None and time.monotonic() >= self._retry_s:
            self._retry_s = None
            self._ask()

    def on_hosts(self, *, is_new_term: bool) -> None:
        """Handle that hosts have come or are lost, or that another one leads."""
        hosts = self._hosts
        if is_new_term:
            self._forget()
            self._tell_ranks(0)
            self._scaling.on_new_term()
        for host in self._expected - set(hosts.newcomers):
            if host in hosts.lost:
                self._relay.say(f"{hosts.name(host)}, {hosts.lost[host]}; it had not joined yet")
        self._expected = set(hosts.newcomers)
        if self.newcomer is not None and self.newcomer not in hosts.members:
            if self._state in ("wanting", "pausing", "decided"):
                hosts.say({"do": "withdraw"})
            self._forget()
        if hosts.leads and self._scaling.size and (lost := [host for host in hosts.placement if host in hosts.lost]):
            self.end_scaling(f"{hosts.name(lost[0])}, was lost meanwhile")
        if hosts.leads and self.newcomer is None and hosts.newcomers and not self._scaling.size:
            self.newcomer = hosts.newcomers[0]
            self._ask()

    def on_said(self, host: int, entry: Mapping[str, Any]) -> None:
        """Handle what an agent has told all, or the leader."""
        do, hosts = entry["do"], self._hosts
        if do == "want":
            self._wanted, self._is_told = entry["number"], False
        elif do == "pause" and self._wanted:
            self._scaling.pause()
            self._are_asked, self._told_waits = True, False
            self._generation.want(self._wanted)
        elif do in ("withdraw", "turn away"):
            self._tell_ranks(0)
            if do == "turn away":
                self._expected.discard(entry["host"])
                self._relay.say(f"{hosts.name(entry['host'])}, cannot join: {entry['reason']}")
        elif do in HostScaling.MESSAGES and do != "scale":
            self._told_ready = self._told_ready and do != "scale begins"
            if do == "scale ends" and entry["host"] is None:
                self._tell_ranks(0)
            self._scaling.on_said(entry)
        elif do == "scale" and hosts.leads:
            self._on_scale(host, entry["size"])
        elif do == "scale fails" and hosts.leads and self._scaling.size == entry["size"]:
            self.end_scaling(entry["reason"])
        elif do == "invite":
            self._relay.say(f"{hosts.name(entry['host'])}, joins with {name_ranks(entry['ranks'])}, which start now")
        elif hosts.leads and (self.newcomer is not None or self._scaling.size):
            self._on_answer(host, entry)

    def plan(self, answers: Mapping[int, Mapping[str, Any]], members: Collection[Member]) -> None:
        """Decide which ranks the newcomer gets, and invite it. On the leader."""
        if self._state == "new" and self._scaling.size:
            self._plan_scaling(answers, members)
        if self._state != "new" or self.newcomer is None:
            return
        hosts = self._hosts
        size = sum(map(len, hosts.placement.values()))
        if obstacle := _obstacle(members):
            self.turn_away(obstacle)
            return
        if len(members) < size or not all(member.armed for member in members):
            self._retry_s = time.monotonic() + _RETRY_S
            return
        fixed = next((answer["fixed_size"] for answer in answers.values() if answer["fixed_size"]), "")
        most = min(answer["virtual_ranks"] for answer in answers.values())
        self.ranks = ranks_for_newcomer(
            hosts.placement,
            capacities=hosts.capacities,
            homes=hosts.homes,
            most=hosts.capacities[self.newcomer],
            largest_world=size if fixed else most,
        )
        if not self.ranks:
            few = f"it has {plural(size, 'rank')} for {plural(most, 'virtual rank')}, so none is left for another host"
            self.turn_away(fixed or few)
            return
        self._state, self._brings = "invited", {self.newcomer}
        hosts.say(
            {
                "do": "invite",
                "host": self.newcomer,
                "ranks": self.ranks,
                "attempt": self._generation.attempt,
                "size": max(size, self.ranks[-1] + 1),
                "placement": {str(host): ranks for host, ranks in hosts.placement.items()},
                "homes": {str(rank): host for rank, host in hosts.homes.items()},
                "capacities": {str(host): ranks for host, ranks in hosts.capacities.items()},
            }
        )

    def may_join(self, answers: Mapping[int, Mapping[str, Any]], members: Collection[Member]) -> bool:
        """Return True if the newcomer's ranks can be among the ranks now: all of the others wait. On the leader."""
        if self._state != "pausing" or not all(answer["waits"] for answer in answers.values()):
            return False
        if obstacle := _obstacle(members):
            if self._scaling.size:
                self.end_scaling(obstacle)
            else:
                self.turn_away(obstacle)
            return False
        return len(members) == sum(map(len, self._hosts.placement.values()))

    def turn_away(self, reason: str) -> None:
        """Refuse the newcomer, for a reason that completes "it cannot join: …". On the leader."""
        self._hosts.say({"do": "turn away", "host": self.newcomer, "reason": reason})
        self._state, self._retry_s = "invited", None  # until it has left

    def end_scaling(self, reason: str) -> None:
        """Give up the change of the number of ranks, unless it has been decided. On the leader."""
        if self._state != "decided":
            self._scaling.end(reason)
            self._forget()
            self._hosts_may_come()

    def decided(self) -> None:
        """Note that all have been told who the ranks are. On the leader."""
        self._state = "decided"

    def joined(self) -> None:
        """Note that the new ranks are among the ranks, and all go on."""
        self._tell_ranks(0)
        self._forget()
        self._hosts_may_come()

    def look_again(self) -> None:
        """Go on with what was asked for while ranks were replaced. On the leader."""
        if self._hosts.leads and self._state == "new" and (self.newcomer is not None or self._scaling.size):
            self._ask()

    def _hosts_may_come(self) -> None:
        """Turn to a host that has come meanwhile."""
        self.on_hosts(is_new_term=False)

    def _on_scale(self, host: int, size: int) -> None:
        """Handle that another number of ranks is wanted. On the leader."""
        if self.newcomer is not None:
            self._scaling.refuse(host, f"{self._hosts.name(self.newcomer)}, is about to join; try it again in a moment")
        elif self._scaling.size:
            self._scaling.refuse(host, f"a change to {plural(self._scaling.size, 'rank')} is under way")
        else:
            self._scaling.size = size
            self._ask()

    def _plan_scaling(self, answers: Mapping[int, Mapping[str, Any]], members: Collection[Member]) -> None:
        comes = self._scaling.plan(answers, members)
        if comes is None:
            self._hosts_may_come()
            return
        self._state, self._brings = "invited", set(comes)
        self.ranks = sorted(rank for ranks in comes.values() for rank in ranks)
        if not comes:
            self._want(self._scaling.size)

    def _want(self, size_then: int) -> None:
        """Let all write down the number of ranks that is wanted."""
        self._state, self._came = "wanting", set()
        size = sum(map(len, self._hosts.placement.values()))
        self._hosts.say({"do": "want", "number": size_then if size_then != size else SAME_SIZE + size})

    @property
    def _starts(self) -> list[int]:
        """The ranks that this host brings."""
        return self._generation.ranks if self._hosts.joins else self._scaling.coming

    def _on_answer(self, host: int, entry: Mapping[str, Any]) -> None:
        do, hosts = entry["do"], self._hosts
        if do == "ready" and host in self._brings and self._state == "invited":
            self._brings.discard(host)
            size = sum(map(len, hosts.placement.values()))
            if not self._brings:
                self._want(self._scaling.size or max(size, self.ranks[-1] + 1))
        elif do == "wants" and self._state == "wanting":
            self._came.add(host)
            if self._came >= set(hosts.hosts):
                self._state, self._came = "pausing", set()
                hosts.say({"do": "pause"})
        elif do == "waits" and self._state == "pausing":
            self._came = self._came | {host} if entry["yes"] else self._came - {host}
            if self._came >= set(hosts.hosts):
                self._ask()

    def _tell_ranks(self, number: int) -> None:
        self._wanted, self._are_asked = number, False
        self._generation.want(number)

    def _forget(self) -> None:
        self.newcomer, self.ranks, self._state, self._retry_s = None, [], "new", None

    def _is_ready(self, rank: int) -> bool:
        """Return True if a process of the newcomer has come to its Trainer, and waits for the others."""
        note = self._generation.pages[rank].note
        return note is not None and note.phase == "resize"


def _obstacle(members: Collection[Member]) -> str:
    """Return why no host can join a run of these ranks; "" if one can."""
    if refusal := next((member.refusal for member in members if member.refusal), ""):
        return f"no rank can be moved or added alone: {refusal}"
    return "the run is about to end" if any(member.finished for member in members) else ""
