"""How this host takes part in a job whose hosts have met: terms begin, hosts come and are lost, and the job ends.

Each host serves a store of its own; the one of the leader, the host with the lowest number at first, has the log in
which all tell each other what happens (`launch.hosts.term`). If the leader is lost, the next host takes its place.
Start reading at `JobMembership._on_entry`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.admission import answer_newcomer
from unisono.launch.hosts.announcement import Announcement
from unisono.launch.hosts.election import Election, silence
from unisono.launch.hosts.end_watch import has_ended, watch_end
from unisono.launch.hosts.guarded_port import LocalPort
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.late_host import Admission
from unisono.launch.hosts.meeting import Meeting
from unisono.launch.hosts.own_store import OwnStore, connect, way_to
from unisono.launch.hosts.roster import Roster
from unisono.launch.hosts.term import Term
from unisono.launch.hosts.torchrun_peers import await_all, has_torchrun
from unisono.tcp_store import LOOPBACK

__all__ = ["JobMembership"]

_LINGER_S = 3.0
"""How long the host with the store stays for the others to read how the job has ended."""


class JobMembership:
    """What this host knows of the members of a job, and does as one of them.

    Args:
        settings: Where hosts meet.
        addresses: The addresses of this host.
        own: The store of this host.
        meeting: The hosts that have met.
        lock: Held while anything of this changes. The caller of `begin`, `report` and `finish` holds it.
        tell: Sends a message to the agent.
    """

    def __init__(
        self,
        settings: HostSettings,
        addresses: HostAddresses,
        own: OwnStore,
        meeting: Meeting,
        *,
        lock: threading.RLock,
        tell: Callable[..., None],
    ) -> None:
        self._settings, self._addresses, self._own, self._meeting = settings, addresses, own, meeting
        self._lock, self._tell = lock, tell
        self._host = meeting.place.host
        self.term: Term | None = None
        """The present term; None before the first."""
        self.is_over = False
        """True if the job has ended, or is about to, and all who can know do."""
        self.is_done = False
        """True if the ranks of this host have succeeded."""
        self._way: LocalPort | None = None
        self._roster = Roster()
        self._is_outside = False  # the log has not let this host in yet, or the others go on without it
        self._announcement: Announcement | None = None

    def begin(self, admission: Admission | None) -> None:
        """Begin the first term.

        Args:
            admission: What this host has learned if it comes late.
        """
        if admission is None:
            members = set(self._meeting.hellos)
            self._begin_term(0, min(members), members, lost={})
        else:
            self._is_outside = True
            self._begin_term(admission.term, admission.leader, admission.members, lost={})

    def report(self, report: Mapping[str, Any]) -> None:
        """Tell the others how the job ends on this host."""
        assert self.term is not None
        self.is_over = True
        self.term.say({"do": "report", **report})

    def finish(self) -> None:
        """Tell the others that the ranks of this host have succeeded."""
        assert self.term is not None
        self.is_done = True
        self.term.say({"do": "finished"})

    def end_with_torchrun(self, problem: str) -> None:
        """End the job: hosts of torchrun are done (""), or no host can go on with them."""
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            if problem:
                self._tell("report", host=-1, kind="ended", headline=problem, code=1)
            else:
                self._tell("finished")

    def close(self) -> None:
        """Leave the others, and stay a moment if they still need the store of this host."""
        term = self.term
        if self._announcement is not None:
            self._announcement.close()
        if term is not None:
            self._meeting.close_rendezvous()
            term.leave(linger_s=_LINGER_S)

    def _open(self, leader: int) -> tuple[str, int]:
        """Open a way to the store of a host in place of the one before; return the address of its end on this host."""
        if self._way is not None:
            self._way.close()
            self._way = None
        if leader == self._host:
            return self._own.address
        self._way = way_to(self._meeting.hellos[leader], self._settings.token)
        return LOOPBACK, self._way.port

    def _begin_term(self, number: int, leader: int, members: Collection[int], *, lost: Mapping[int, str]) -> None:
        """Begin a term. The lock is held."""
        self._store_at = self._open(leader)
        self._roster.begin(members)
        term = Term(
            number,
            leader,
            self._host,
            members=members,
            connect=lambda: connect(self._store_at, f"term/{number}"),
            timeout_s=self._settings.host_timeout_s,
            told=lambda host, entry: self._on_entry(term, host, entry),
            silent=lambda hosts: self._exclude(dict.fromkeys(hosts, silence(self._settings)), ended=False),
            broken=lambda reason: self._on_broken(term, reason),
        )
        self.term = term
        term.begin()
        if not self._is_outside:
            term.say_to_leader({"do": "agreed", "members": sorted(members)})
        self._tell_hosts(lost)
        if leader == self._host:
            for host in self._roster.members - {self._host}:
                self._watch_end(term, host)
            if number > 0:
                self._announce()
        if self.is_done:
            term.say({"do": "finished"})

    def _tell_hosts(self, lost: Mapping[int, str], **more: Any) -> None:
        assert self.term is not None
        self._tell(
            "hosts",
            term=self.term.number,
            leader=self.term.leader,
            members=sorted(self._roster.members),
            lost={str(host): reason for host, reason in lost.items()},
            store=list(self._store_at),
            **more,
        )

    def _on_entry(self, term: Term, host: int, entry: dict[str, Any]) -> None:
        with self._lock:
            do, roster = entry["do"], self._roster
            if term is not self.term or (self._is_outside and (do != "newcomer" or entry["host"] != self._host)):
                return
            if host not in roster.members:
                return
            if do == "report":
                self._on_report(term, host, entry)
            elif do == "members":
                self._on_members(term, host, entry)
            elif do == "newcomer":
                self._on_newcomer(term, entry)
            elif do == "agreed":
                if roster.agree(host, entry["members"]):
                    term.say({"do": "known", "members": sorted(roster.members)})
                    self._announce()
            elif do == "known":
                roster.know(entry["members"])
            elif do == "finished":
                roster.finished.add(host)
                self._look_whether_done()
            else:
                if do == "decide":
                    roster.finished -= {entry.get("newcomer")}
                elif do == "start again":
                    roster.finished -= set(entry["hosts"])
                    self.is_done = False
                self._tell("said", host=host, entry=entry)

    def _on_report(self, term: Term, host: int, entry: Mapping[str, Any]) -> None:
        """Handle how the job has ended on a host, or for all. The lock is held."""
        if entry["kind"] == "lost" and entry.get("host", host) == host:
            if host == term.leader and host != self._host and not self.is_over:
                term.end()
                self._follow_next(term, entry["headline"], ended=True)
            elif term.leader == self._host:
                self._exclude({host: entry["headline"]}, ended=True)
        elif host != self._host or "host" in entry:
            if self.is_over and entry.get("host") == self._host:  # it has said so itself
                return
            self.is_over = True
            report = {k: v for k, v in entry.items() if k != "do"}
            self._tell("report", **{"host": host, **report})

    def _on_members(self, term: Term, leader: int, entry: Mapping[str, Any]) -> None:
        """Go on with the hosts that the leader names. The lock is held."""
        if self._host not in entry["members"]:
            self._is_outside = True
            if self.is_over:  # it has said that it is lost
                return
            self.is_over = True
            headline = "has gone on without this host, which did not answer in time"
            self._tell("report", host=leader, kind="lost", headline=headline, code=1)
            return
        self._roster.shrink(entry["members"])
        term.watch(self._roster.members)
        term.say_to_leader({"do": "agreed", "members": entry["members"]})
        self._tell_hosts(entry["lost"])
        self._look_whether_done()

    def _on_newcomer(self, term: Term, entry: Mapping[str, Any]) -> None:
        """Take another host among the members. The lock is held."""
        host, roster = entry["host"], self._roster
        if self._is_outside:
            self._is_outside = False
            roster.begin(entry["members"])
            roster.known = set(entry["members"])
        hello = self._meeting.hellos[host] = entry["hello"]
        roster.add(host)
        term.watch(roster.members)
        term.say_to_leader({"do": "agreed", "members": sorted(roster.members)})
        self._tell_hosts({}, names={str(host): hello["name"]}, ranks={str(host): hello["ranks"]})
        if term.leader == self._host:
            self._watch_end(term, host)

    def _announce(self) -> None:
        """Let hosts find this one, the leader, from now on, if others may come."""
        settings, meeting = self._settings, self._meeting
        if self._announcement is None and settings.min_hosts < settings.max_hosts and not has_torchrun(meeting):
            self._announcement = Announcement(
                settings,
                self._addresses,
                hello=self._own.hello,
                own=self._own.address,
                admit=self._admit,
                say=self._warn,
            )

    def _admit(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to a host that has come late. Only on the leader."""
        with self._lock:
            term, meeting, roster = self.term, self._meeting, self._roster
            if self.is_over or term is None or term.leader != self._host:
                return {"later": "the job is about to end"}
            answer = answer_newcomer(hello, roster=roster, hellos=meeting.hellos, settings=self._settings)
            if reason := answer.get("refused"):
                self._warn(f"refused {hello['name']}, which wants to join: {reason}")
            if "host" in answer:
                host, members = answer["host"], sorted(roster.members)
                term.say({"do": "newcomer", "host": host, "hello": dict(hello), "members": members})
                # Until the log has it: two hosts must not get the same number.
                meeting.hellos[host] = dict(hello)
                roster.add(host)
                answer |= {"term": term.number, "leader": term.leader, "members": members}
            return answer

    def _look_whether_done(self) -> None:
        meeting = self._meeting
        if self._roster.are_done and not self.is_over:
            if has_torchrun(meeting):
                await_all(meeting, came=partial(self.end_with_torchrun, ""))
            else:
                self.is_over = True
                self._tell("finished")

    def _exclude(self, lost: Mapping[int, str], *, ended: bool) -> None:
        """Go on without some hosts, or end the job. Only on the leader."""
        with self._lock:
            gone = self._roster.members.intersection(lost) - {self._host}
            if self.is_over or not gone or self.term is None:
                return
            rest, least = self._roster.members - gone, self._settings.min_hosts
            if ended:
                self._roster.ended |= gone
            if obstacle := self._roster.obstacle(rest, min_hosts=least):
                host = min(gone)
                headline = f"{lost[host]}; {obstacle}" if least < self._settings.max_hosts else lost[host]
                self.term.say({"do": "report", "kind": "lost", "host": host, "headline": headline, "code": 1})
                # The others may be those that do not answer.
                self.is_over = True
                self.term.watch(rest)  # those alone are waited for at the end
                self._tell("report", host=host, kind="lost", headline=headline, code=1)
            else:
                self._roster.shrink(rest)
                self.term.watch(rest)
                reasons = {str(host): lost[host] for host in gone}
                self.term.say({"do": "members", "members": sorted(rest), "lost": reasons})

    def _watch_end(self, term: Term, host: int) -> None:
        """Exclude a host once all of its launcher has been killed. On the leader."""
        hello = self._meeting.hellos[host]

        def has_left() -> bool:
            if term is not self.term or not self._has_ended(host):
                return True
            return bool(connect(self._store_at, f"term/{term.number}").check([f"done/{host}"]))

        def ended() -> None:
            self._exclude({host: "has closed its connection: its launcher has ended, or was killed"}, ended=True)

        watch_end(hello, self._settings.token, has_left=has_left, ended=ended)

    def _has_ended(self, host: int) -> bool:
        return has_ended(self._meeting.hellos[host])

    def _on_broken(self, term: Term, reason: str) -> None:
        """Go on without the leader. Called by one of the threads of the term, or that which looks after it."""
        with self._lock:
            if term is not self.term or self.is_over:
                return
            self._follow_next(term, reason, ended=False)

    def _follow_next(self, term: Term, reason: str, *, ended: bool) -> None:
        """Begin the next term in another thread. The lock is held.

        Args:
            ended: True if the leader has said that it ends.
        """
        is_closed = self._way is not None and self._way.has_ended
        if self._way is not None:
            self._way.close()
        arguments = (term, {term.leader: reason}, ended, is_closed)
        threading.Thread(target=self._find_leader, args=arguments, name="unisono-hosts-next", daemon=True).start()

    def _find_leader(self, term: Term, lost: dict[int, str], has_said_so: bool, is_closed: bool) -> None:
        """Find the leader of the next term, and begin it."""
        ended = {term.leader} if has_said_so or (is_closed and self._has_ended(term.leader)) else set()
        roster = replace(self._roster, ended=self._roster.ended | ended)
        verdict = Election(
            term.number + 1,
            host=self._host,
            roster=roster,
            lost=lost,
            settings=self._settings,
            open_way=self._open_anew,
            has_ended=self._has_ended,
        ).run()
        with self._lock:
            if self.term is not term or self.is_over:
                return
            self._roster.ended |= roster.ended  # the next loss may come before all have confirmed who is left
            if verdict is None:
                self._end_for(term.leader, lost[term.leader], "no other host can be reached")
            elif verdict.obstacle or self._host not in verdict.members:
                self._end_for(term.leader, lost[term.leader], verdict.obstacle)
            else:
                self._begin_term(term.number + 1, verdict.leader, verdict.members, lost=verdict.lost)

    def _open_anew(self, leader: int) -> tuple[tuple[str, int], LocalPort | None]:
        with self._lock:
            return self._open(leader), self._way

    def _end_for(self, host: int, reason: str, obstacle: str) -> None:
        self.is_over = True
        is_range = self._settings.min_hosts < self._settings.max_hosts
        headline = f"{reason}; {obstacle}" if obstacle and is_range else reason
        self._tell("report", host=host, kind="lost", headline=headline, code=1)

    def _warn(self, text: str) -> None:
        self._tell("warned", text=text)
