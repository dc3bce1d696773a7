"""Replaces ranks of a job on several hosts: those that have died, on their host, and those of a lost host, on others.

One agent decides, that of the leader. When a rank has died or a host is lost, it asks the agents of all hosts what they
know of their ranks; from their answers follows the decision (`launch.replacement_policy`), which all agents act on, as
one does for the ranks of one machine (`launch.replacing`). A decision that was under way when the leader was lost is
made again by the next one. Start reading at `HostReplacing.on_said`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from unisono.launch.hosts.host_joining import HostJoining
from unisono.launch.hosts.host_scaling import HostScaling
from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.hosts.rank_places import place_ranks
from unisono.launch.hosts.rank_states import (
    changed_places,
    death_with_host,
    decode_death,
    decode_members,
    encode_death,
    encode_members,
    new_places,
)
from unisono.launch.replacement_policy import Await, Death, GiveUp, decide_replacement
from unisono.launch.replacing import Replacing, describe_deaths, describe_spares
from unisono.recovery_link import Membership
from unisono.text import name_ranks
from unisono.watch.figures import plural

__all__ = ["HostReplacing"]

_CALM_S = 30.0
_POLL_S = 0.02
_LEAVE_S = 30.0
"""How long a process may take to end whose rank is on another host now."""


class HostReplacing(Replacing):
    """The replacements in a job on several hosts, as one of their agents makes them.

    Args:
        hosts: The other hosts.
        options: Those of `Replacing`.
    """

    def __init__(self, *arguments: Any, hosts: JobHosts, enabled: bool, **options: Any) -> None:
        super().__init__(*arguments, enabled=enabled and hosts.replaces, **options)
        self._hosts = hosts
        self.scaling = HostScaling(
            hosts,
            self._generation,
            self._relay,
            enabled=self._enabled,
            server=self._server,
            fork=self._fork,
            show_traceback=self.show_traceback,
        )
        """The changes of the number of ranks."""
        self._joining = HostJoining(
            hosts, self._generation, self._relay, scaling=self.scaling, ask=self._ask, waits=self._waits
        )
        self._announced: set[int] = set()  # dead ranks that the leader knows
        self._told_joined = 0
        self._is_over = False
        # On the leader:
        self._round = 0
        self._answers: dict[int, dict[str, Any]] = {}
        self._is_asking = False
        # Ranks of a first start may have been about to meet at the store of a leader that is lost since.
        self._term = hosts.term if self._generation.attempt else 0
        self._must_decide = False
        self._ask_s: float | None = None  # when to ask again, while a death waits for ranks to make their Trainer
        self._joined: dict[int, int] = {}  # by host, the latest decision that all of its ranks have joined
        self._filled: dict[int, list[bool]] = {}  # by host, for each rank that it has started anew, whether by a spare
        self._moved: dict[int, str] = {}  # by lost host, what has happened and where its ranks are now
        self._scaled = ""  # how the number of ranks has changed
        self._began_s: float | None = None

    def on_hosts(self) -> None:
        """Handle the loss of hosts, those that join, and another leader."""
        if not self._enabled and self._hosts.leads:
            self._end_for_lost()
            for host in self._hosts.newcomers:
                reason = "its ranks stay where they are (--recover off)"
                self._hosts.say({"do": "turn away", "host": host, "reason": reason})
        elif self._hosts.leads and (self._term != self._hosts.term or self._hosts.lost_with_ranks):
            self._must_decide = self._must_decide or self._term != self._hosts.term
            self._ask()
        if self._enabled:
            self._joining.on_hosts(is_new_term=self._term != self._hosts.term)
        self._term = self._hosts.term

    def on_said(self, host: int, entry: Mapping[str, Any]) -> None:
        """Handle what an agent has told all."""
        do = entry["do"]
        # The leader asks once more if it hears of another death while its decision to give up is still on the way.
        if self._generation.is_closed or (self._is_over and do != "give up"):
            return
        if do == "died" and self._hosts.leads:
            self._ask()
        elif self._hosts.joins and not (do == "decide" and entry.get("newcomer") == self._own_host):
            return  # this host has no part in the run yet
        elif do == "ask":
            self._answer(entry["round"])
        elif do == "ranks" and self._hosts.leads and self._is_asking and entry["round"] == self._round:
            self._answers[host] = dict(entry)
            self._decide_if_known()
        elif do == "decide":
            self._follow(entry)
        elif do == "give up":
            self._is_over = True
            exhausted = entry["exhausted"] if entry["exhausted"] in self._generation.ranks else None
            self._give_up(GiveUp(entry["reason"], exhausted=exhausted))
        elif do == "joined":
            self._joined[host] = entry["number"]
            self._filled[host] = entry["by_spare"]
            self._complete()
        elif do == "recovered" and entry["number"] == self.number:
            self._go_on(entry)
        else:
            self._joining.on_said(host, entry)

    @property
    def _own_host(self) -> int:
        assert self._hosts.place is not None
        return self._hosts.place.host

    def _waits(self, rank: int) -> bool:
        """Return True if a rank waits between two steps until others are among the ranks."""
        note = self._generation.pages[rank].note
        return note is not None and note.phase == "resize" and not self._lacks_state(rank)

    def take(self) -> bool:
        """Handle new failures. Return False if no rank is to be replaced: then the job ends as a whole."""
        return not self._is_over and not self._hosts.joins and super().take()

    def tick(self) -> bool:
        """Do what is due. Return False if no rank is to be replaced: then the job ends as a whole."""
        if self._is_over:
            return not self._generation.failed
        self._joining.tick()
        if self._ask_s is not None and time.monotonic() >= self._ask_s:
            self._ask()
        return super().tick()

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is due, by the monotonic clock; None if nothing is under way."""
        deadlines = [super().next_deadline_s()]
        if not self._is_over:
            deadlines += [self._joining.next_deadline_s(), self._ask_s]
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def look(self) -> None:
        """Tell the leader that the ranks of this host have joined the latest decision, once they have."""
        pages = [self._generation.pages[rank] for rank in self._generation.ranks]
        if self._poll_s is None or self._told_joined == self.number or self._deaths:
            return
        if all(page.joined == self.number for page in pages):
            self._told_joined = self.number
            self._hosts.say_to_leader({"do": "joined", "number": self.number, "by_spare": self._by_spare})

    def _kill_late(self, now_s: float) -> None:
        """Kill processes that are about to end, and do not: not those that have their ranks by now."""
        late = self._deaths.keys() | self._generation.leaving
        self._kill_s = {rank: kill_s for rank, kill_s in self._kill_s.items() if rank in late}
        super()._kill_late(now_s)

    def _count(self, death: Death) -> None:
        """Do nothing: the leader counts the deaths that it decides about."""

    def _act(self, now_s: float) -> bool:
        if not self._enabled:
            return super()._act(now_s)
        ended = set(self._ended(now_s))
        if ended - self._announced:
            self._announced |= ended
            self._hosts.say_to_leader({"do": "died"})
        self._kill_late(now_s)
        return True

    def _ask(self) -> None:
        """Ask the agents of all hosts about their ranks."""
        self._ask_s = None
        if self._is_over:
            return
        if self._began_s is None:
            self._began_s = time.monotonic()
        self._round += 1
        self._answers, self._is_asking = {}, True
        self._hosts.say({"do": "ask", "round": self._round})

    def _answer(self, number: int) -> None:
        gone = self._deaths.keys() - self._generation.running
        pages = [self._generation.pages[rank] for rank in self._generation.ranks]
        self._announced |= gone
        self._hosts.say_to_leader(
            {
                "do": "ranks",
                "round": number,
                "number": self.number,
                "members": encode_members(self._members()),
                "deaths": [encode_death(self._deaths[rank]) for rank in sorted(gone)],
                "step": max((note.step for page in pages if (note := page.note) is not None), default=0),
                "waits": all(self._waits(rank) for rank in self._generation.ranks),
                "virtual_ranks": min((page.virtual_ranks for page in pages), default=0),
                "fixed_size": next((page.fixed_size for page in pages if page.fixed_size), ""),
                "leaving": len(self._generation.running - set(self._generation.ranks)),
            }
        )

    def _decide_if_known(self) -> None:
        """Decide who the ranks are, once all agents have answered. On the leader."""
        hosts, answers = self._hosts, self._answers
        if not set(hosts.hosts) <= answers.keys():
            return
        self._is_asking = False
        step = max(answer["step"] for answer in answers.values())
        deaths = [decode_death(death) for host in hosts.hosts for death in answers[host]["deaths"]]
        died, lost = list(deaths), hosts.lost_with_ranks
        deaths += [death_with_host(rank, step) for host in lost for rank in hosts.placement[host]]
        members = [member for host in hosts.hosts for member in decode_members(answers[host]["members"])]
        newcomer, came, is_scaled = None, [], False
        if not deaths and not self._must_decide:
            self._joining.plan(answers, members)
            if not self._joining.may_join(answers, members):
                self._began_s = None
                return
            newcomer, came, is_scaled = self._joining.newcomer, self._joining.ranks, bool(self.scaling.size)
            self._joining.decided()
        self._must_decide = False
        for death in deaths:
            super()._count(death)
        if deaths or (newcomer is None and not is_scaled):
            choice = decide_replacement(deaths, members, self._counts)
            if isinstance(choice, Await):
                if self._may_await(now_s := time.monotonic()):
                    self._ask_s = now_s + _POLL_S
                    return
                choice = GiveUp()
            self._arm_s = None
            if isinstance(choice, GiveUp):
                hosts.say({"do": "give up", "reason": choice.reason, "exhausted": choice.exhausted})
                self._end_for_lost(choice.reason)
                return
        placement = self.scaling.placement
        if not is_scaled:
            placement = place_ranks(hosts.placement, hosts=hosts.hosts, newcomer=newcomer, ranks=came)
        for host in lost:
            places = {each: [r for r in hosts.placement[host] if r in ranks] for each, ranks in placement.items()}
            where = ", ".join(f"{name_ranks(ranks)} on host {each}" for each, ranks in places.items() if ranks)
            self._moved[host] = f"{hosts.name(host)}, {hosts.lost.get(host, 'is lost')}: {where} now"
        if newcomer is not None:
            self._moved[newcomer] = f"{hosts.name(newcomer)}, has joined with {name_ranks(came)}"
        if is_scaled:
            size = sum(map(len, placement.values()))
            before = sum(map(len, hosts.placement.values()))
            self._scaled = f"{before} -> {plural(size, 'rank')} after step {step}"
        refill = [death.failure.rank for death in deaths]
        self._replaced += died
        hosts.say(
            {
                "do": "decide",
                "number": max(answer["number"] for answer in answers.values()) + 1,
                "new": sorted({*refill, *came, *(member.rank for member in members if not member.has_state)}),
                "refill": sorted(refill),
                "newcomer": newcomer,
                "came": came,
                "is_scaled": is_scaled,
                "places": changed_places(hosts.placement, placement),
                "step": step,
            }
        )

    def _end_for_lost(self, reason: str = "") -> None:
        for host in self._hosts.lost_with_ranks[:1]:
            what = self._hosts.lost.get(host, "is lost")
            what = f"{what}; {reason}" if reason else what
            self._is_over = True
            if not self._hosts.restart_without(f"{self._hosts.name(host)}, {what}"):
                self._hosts.tell_lost(host, what)

    def _follow(self, entry: Mapping[str, Any]) -> None:
        """Act on a decision: start the processes that this host is to have, and tell its ranks."""
        generation, hosts = self._generation, self._hosts
        before = set(generation.ranks)
        self.number = entry["number"]
        hosts.placement = new_places(hosts.placement, entry["places"])
        own, came = hosts.placement[self._own_host], entry["came"]
        places = {rank: host for host, ranks in hosts.placement.items() for rank in ranks}
        hosts.homes = {rank: hosts.homes.get(rank, host) for rank, host in places.items()}
        hosts.joins = hosts.joins and entry["newcomer"] != self._own_host
        generation.place(own)
        if entry["is_scaled"]:
            self.scaling.follow(entry["step"])
        generation.resize(sum(map(len, hosts.placement.values())))
        for rank in before - set(own):
            self._release(rank)
        generation.host = hosts.current_place()
        for rank in set(own) - before:
            self._relay.move(rank, generation.local_rank(rank))
        self._decided_ns = time.monotonic_ns()
        for rank in {*entry["refill"], *came}:
            self._made[rank], self._rounds[rank] = self.number, self._counts.round
            self._steps[rank] = entry["step"]
        refill = [rank for rank in entry["refill"] if rank in own]
        for rank in refill:
            if rank in self._deaths:
                self._clear(rank)
                self._announced.discard(rank)
        # A process that has not left since its rank went elsewhere is killed; then it is replaced as any that dies.
        self._kill_s |= dict.fromkeys(generation.leaving.intersection(refill), 0.0)
        begins = [self._fill(rank) for rank in refill if rank not in generation.leaving]
        membership = Membership(
            self.number,
            tuple(entry["new"]),
            generation.size,
            tuple(tuple(ranks) for _, ranks in sorted(hosts.placement.items())),
            hosts.store,
        )
        staying = generation.running.intersection(own) - generation.leaving
        for rank in staying:
            generation.pages[rank].decide(membership)
        for rank in staying:
            generation.pages[rank].settle(self.number)
        generation.observer.disregard_past(_CALM_S)
        self._poll_s = time.monotonic() + _POLL_S
        for begin in begins:
            begin()
        self._complete()

    def _release(self, rank: int) -> None:
        """Let the process of a rank end that is on another host now: with this decision, it is none of the ranks."""
        page = self._generation.pages[rank]
        if rank in self._generation.leaving:
            page.decide(Membership(self.number, (), 0, store=self._hosts.store))
            page.settle(self.number)
            self._kill_s[rank] = time.monotonic() + _LEAVE_S

    def _complete(self) -> None:
        """Tell all that the ranks go on, once those of all hosts have joined. On the leader."""
        if not self._hosts.leads or self._is_asking:
            return
        if any(self._joined.get(host) != self.number for host in self._hosts.hosts):
            return
        began_s = time.monotonic() if self._began_s is None else self._began_s
        parts = list(self._moved.values())
        if self._scaled:
            parts.append(self._scaled)
        if self._replaced:
            parts.insert(0, f"{describe_deaths(self._replaced)}; replaced")
        died = {death.failure.rank for death in self._replaced}
        by_spare = [each for host in self._hosts.hosts for each in self._filled.get(host, ())]
        how = describe_spares(by_spare)
        if how and self._moved:
            how = f",{how.removeprefix(',')}"
        self._hosts.say(
            {
                "do": "recovered",
                "number": self.number,
                "ranks": sorted(died),
                "what": "; ".join(parts) + how if parts else "all ranks met again",
                "seconds": round(time.monotonic() - began_s, 3),
                "deaths": [death.facts() for death in self._replaced],
                "decided_ns": self._decided_ns,
                "script_s": 0.0,
                "spares": sum(by_spare),
                "newcomer": self._joining.newcomer if self._joining.newcomer in self._moved else None,
                "is_scaled": bool(self._scaled),
            }
        )
        self._replaced.clear()
        self._moved.clear()
        self._scaled = ""
        self._filled.clear()
        self._began_s = None

    def _go_on(self, entry: Mapping[str, Any]) -> None:
        """Report that ranks have been replaced, and all go on."""
        if entry["newcomer"] is not None or self.scaling.status["state"] == "changing":
            self.scaling.complete(entry["seconds"])
            self._joining.joined()
        else:
            self._joining.look_again()
        if not entry["is_scaled"] or entry["ranks"]:
            told = {name: value for name, value in entry.items() if name not in ("do", "newcomer", "is_scaled")}
            self._completed(told)
        self._poll_s = None
        self._by_spare.clear()
        self._counts.next_round()
        self._generation.forget_replaced()
        joined_ns = [self._generation.pages[rank].joined_ns for rank in self._generation.ranks]
        self._generation.observer.disregard_past(0.0, until_ns=min(joined_ns, default=None))
        self._relay.say(f"{entry['what']}, {entry['seconds']:.2f} s")
