"""This host's part in a job on several hosts: it meets the others, then watches them until the job has ended.

It lives in threads of the process that hosts stores (`launch.store_process`), since it needs torch. Each host serves a
store of its own; the one of the leader, the host with the lowest number at first, has the log in which all tell each
other what happens (`launch.hosts.term`). If the leader is lost, the next host takes its place.

From the agent come `report` (this host's end, for all), `finish` (its ranks have succeeded), `say` (for the agents of
all hosts), `say to leader`, `show` (what all may see) and `look`; to the agent go `notice`, `warned`, `refused`,
`joined` (a `HostPlace`), `hosts` (who is there), `said` (what an agent has told), `shown` (what all show), `report` (of
another host, or about one) and `finished` (the ranks of all hosts have). Start reading at `HostMember._live`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from unisono.launch.channel import Channel, Message
from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.admission import answer_newcomer
from unisono.launch.hosts.announcement import Announcement
from unisono.launch.hosts.arrival import arrive
from unisono.launch.hosts.election import Election, silence
from unisono.launch.hosts.end_watch import has_ended, watch_end
from unisono.launch.hosts.endpoint import HostRefusedError
from unisono.launch.hosts.guarded_port import LocalPort
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.meeting import Meeting
from unisono.launch.hosts.own_store import OwnStore, connect, way_to
from unisono.launch.hosts.roster import Roster
from unisono.launch.hosts.term import Term
from unisono.launch.hosts.torchrun_peers import await_all, has_torchrun, watch_peers
from unisono.tcp_store import LOOPBACK

__all__ = ["HostMember"]

_LINGER_S = 3.0
"""How long the host with the store stays for the others to read how the job has ended."""


class HostMember:
    """One host of a job.

    Args:
        settings: Where hosts meet.
        addresses: The addresses of this host.
        ranks: The number of ranks of this host.
        role: ROLE_NAME of these ranks.
        flags: The flags that all hosts must be given alike, with this host's values.
        agent: The channel to the agent.
    """

    def __init__(
        self,
        settings: HostSettings,
        addresses: HostAddresses,
        *,
        ranks: int,
        role: str,
        flags: Mapping[str, str],
        agent: Channel,
    ) -> None:
        # Its warnings are about what the agent tells in a sentence.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        self._settings, self._addresses, self._agent = settings, addresses, agent
        self._ranks, self._role, self._flags = ranks, role, flags
        self._early: queue.SimpleQueue[Message] = queue.SimpleQueue()  # from the agent, before there is a term
        self._sending = threading.Lock()
        self._changing = threading.RLock()  # held while a term begins or ends
        self._meeting: Meeting | None = None
        self._way: LocalPort | None = None
        self._term: Term | None = None
        self._roster = Roster()
        self._is_late = False  # the job ran already when this host came
        self._is_outside = False  # the log has not let this host in yet, or the others go on without it
        self._announcement: Announcement | None = None
        self._is_done = False  # the ranks of this host have succeeded
        self._over = False  # the job has ended, or is about to, and all who can know do
        self._thread = threading.Thread(target=self._live, name="unisono-hosts", daemon=True)
        self._thread.start()

    def receive(self) -> bool:
        """Take the messages of the agent; return False if it is gone. Called by the process's loop."""
        for message, _ in self._agent.receive():
            self._take(message)
        return not self._agent.closed

    def lose(self, reason: str) -> None:
        """Tell the other hosts that this one is lost, unless they know how it ends."""
        with self._changing:
            if not self._over:
                self._take({"type": "report", "kind": "lost", "headline": reason, "code": 1})

    def check(self) -> None:
        """Look whether the leader answers. Called several times a second."""
        term = self._term
        if term is not None and not self._over:
            term.check()

    def close(self) -> None:
        """Leave the others, and stay a moment if they still need the stores of this process."""
        meeting, term = self._meeting, self._term
        if self._announcement is not None:
            self._announcement.close()
        if meeting is not None and term is not None:
            meeting.close_rendezvous()
        if term is not None:
            term.leave(linger_s=_LINGER_S)
        if meeting is not None and meeting.hosts_store and has_torchrun(meeting):
            time.sleep(1.0)  # torchrun closes the rendezvous at its end, and says nothing afterwards

    def _take(self, message: Message) -> None:
        with self._changing:
            if (term := self._term) is None:
                self._early.put(message)
            elif message["type"] == "say":
                term.say(message["entry"])
            elif message["type"] == "say to leader":
                term.say_to_leader(message["entry"])
            elif message["type"] == "show":
                term.show(message["what"])
            elif message["type"] == "look":
                term.look(lambda shown: self._tell("shown", hosts={str(host): told for host, told in shown.items()}))
            elif message["type"] == "report":
                self._over = True
                term.say({"do": "report", **self._told_to_all(message)})
            elif message["type"] == "finish":
                self._is_done = True
                term.say({"do": "finished"})

    def _told_to_all(self, report: Message) -> dict[str, Any]:
        """Return what the others are told of how the job ends here. If this host only joins, it goes on there."""
        told = {key: value for key, value in report.items() if key not in ("type", "joins")}
        joins = report.get("joins", False)
        if self._is_late if joins is None else joins:
            told |= {"kind": "lost", "headline": f"has given up joining: {told['headline']}", "code": 1}
        return told

    def _live(self) -> None:
        try:
            self._own = own = OwnStore(self._addresses, self._settings.token, ranks=self._ranks, flags=self._flags)
            meeting, admission = arrive(
                self._settings,
                self._addresses,
                own,
                role=self._role,
                notice=lambda text: self._tell("notice", text=text),
                warn=self._warn,
            )
        except HostRefusedError as error:
            self._tell("refused", message=str(error))
            return
        self._meeting = meeting
        first = meeting.hellos[min(meeting.hellos)]
        with self._changing:
            if admission is None:
                self._begin(0, min(meeting.hellos), set(meeting.hellos), lost={})
            else:
                self._is_outside = self._is_late = True
                self._begin(admission.term, admission.leader, admission.members, lost={})
            self._tell(
                "joined",
                place=asdict(meeting.place),
                names=meeting.names(),
                ranks={str(host): hello["ranks"] for host, hello in meeting.hellos.items()},
                nonce=first["nonce"],
                has_torchrun=has_torchrun(meeting),
                is_late=admission is not None,
            )
            while not self._early.empty():
                self._take(self._early.get())
        if has_torchrun(meeting):
            watch_peers(meeting, self._settings, is_over=lambda: self._over or self._is_done, found=self._on_torchrun)

    def _warn(self, text: str) -> None:
        self._tell("warned", text=text)

    @property
    def _host(self) -> int:
        assert self._meeting is not None
        return self._meeting.place.host

    def _open(self, leader: int) -> tuple[str, int]:
        """Open a way to the store of a host in place of the one before; return the address of its end on this host."""
        assert self._meeting is not None
        if self._way is not None:
            self._way.close()
            self._way = None
        if leader == self._host:
            return self._own.address
        self._way = way_to(self._meeting.hellos[leader], self._settings.token)
        return LOOPBACK, self._way.port

    def _begin(self, number: int, leader: int, members: Collection[int], *, lost: Mapping[int, str]) -> None:
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
        self._term = term
        term.begin()
        if not self._is_outside:
            term.say_to_leader({"do": "agreed", "members": sorted(members)})
        self._tell_hosts(lost)
        if leader == self._host:
            for host in self._roster.members - {self._host}:
                self._watch_end(term, host)
            if number > 0:
                self._announce()
        if self._is_done:
            term.say({"do": "finished"})

    def _tell_hosts(self, lost: Mapping[int, str], **more: Any) -> None:
        assert self._term is not None
        self._tell(
            "hosts",
            term=self._term.number,
            leader=self._term.leader,
            members=sorted(self._roster.members),
            lost={str(host): reason for host, reason in lost.items()},
            store=list(self._store_at),
            **more,
        )

    def _on_entry(self, term: Term, host: int, entry: dict[str, Any]) -> None:
        with self._changing:
            do, roster = entry["do"], self._roster
            if term is not self._term or (self._is_outside and (do != "newcomer" or entry["host"] != self._host)):
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
                    self._is_done = False
                self._tell("said", host=host, entry=entry)

    def _on_report(self, term: Term, host: int, entry: Mapping[str, Any]) -> None:
        """Handle how the job has ended on a host, or for all. The lock is held."""
        if entry["kind"] == "lost" and entry.get("host", host) == host:
            if host == term.leader and host != self._host and not self._over:
                term.end()
                self._follow_next(term, entry["headline"], ended=True)
            elif term.leader == self._host:
                self._exclude({host: entry["headline"]}, ended=True)
        elif host != self._host or "host" in entry:
            if self._over and entry.get("host") == self._host:  # it has said so itself
                return
            self._over = True
            report = {k: v for k, v in entry.items() if k != "do"}
            self._tell("report", **{"host": host, **report})

    def _on_members(self, term: Term, leader: int, entry: Mapping[str, Any]) -> None:
        """Go on with the hosts that the leader names. The lock is held."""
        if self._host not in entry["members"]:
            self._is_outside = True
            if self._over:  # it has said that it is lost
                return
            self._over = True
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
        assert self._meeting is not None
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
        assert meeting is not None
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
        with self._changing:
            term, meeting, roster = self._term, self._meeting, self._roster
            assert meeting is not None
            if self._over or term is None or term.leader != self._host:
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
        assert meeting is not None
        if self._roster.are_done and not self._over:
            if has_torchrun(meeting):
                await_all(meeting, came=partial(self._on_torchrun, ""))
            else:
                self._over = True
                self._tell("finished")

    def _exclude(self, lost: Mapping[int, str], *, ended: bool) -> None:
        """Go on without some hosts, or end the job. Only on the leader."""
        with self._changing:
            gone = self._roster.members.intersection(lost) - {self._host}
            if self._over or not gone or self._term is None:
                return
            rest, least = self._roster.members - gone, self._settings.min_hosts
            if ended:
                self._roster.ended |= gone
            if obstacle := self._roster.obstacle(rest, min_hosts=least):
                host = min(gone)
                headline = f"{lost[host]}; {obstacle}" if least < self._settings.max_hosts else lost[host]
                self._term.say({"do": "report", "kind": "lost", "host": host, "headline": headline, "code": 1})
                # The others may be those that do not answer.
                self._over = True
                self._term.watch(rest)  # those alone are waited for at the end
                self._tell("report", host=host, kind="lost", headline=headline, code=1)
            else:
                self._roster.shrink(rest)
                self._term.watch(rest)
                reasons = {str(host): lost[host] for host in gone}
                self._term.say({"do": "members", "members": sorted(rest), "lost": reasons})

    def _watch_end(self, term: Term, host: int) -> None:
        """Exclude a host once all of its launcher has been killed. On the leader."""
        assert self._meeting is not None
        hello = self._meeting.hellos[host]

        def has_left() -> bool:
            if term is not self._term or not self._has_ended(host):
                return True
            return bool(connect(self._store_at, f"term/{term.number}").check([f"done/{host}"]))

        def ended() -> None:
            self._exclude({host: "has closed its connection: its launcher has ended, or was killed"}, ended=True)

        watch_end(hello, self._settings.token, has_left=has_left, ended=ended)

    def _has_ended(self, host: int) -> bool:
        assert self._meeting is not None
        return has_ended(self._meeting.hellos[host])

    def _on_broken(self, term: Term, reason: str) -> None:
        """Go on without the leader. Called by one of the threads of the term, or that which looks after it."""
        with self._changing:
            if term is not self._term or self._over:
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
        with self._changing:
            if self._term is not term or self._over:
                return
            self._roster.ended |= roster.ended  # the next loss may come before all have confirmed who is left
            if verdict is None:
                self._end_for(term.leader, lost[term.leader], "no other host can be reached")
            elif verdict.obstacle or self._host not in verdict.members:
                self._end_for(term.leader, lost[term.leader], verdict.obstacle)
            else:
                self._begin(term.number + 1, verdict.leader, verdict.members, lost=verdict.lost)

    def _open_anew(self, leader: int) -> tuple[tuple[str, int], LocalPort | None]:
        with self._changing:
            return self._open(leader), self._way

    def _end_for(self, host: int, reason: str, obstacle: str) -> None:
        self._over = True
        is_range = self._settings.min_hosts < self._settings.max_hosts
        headline = f"{reason}; {obstacle}" if obstacle and is_range else reason
        self._tell("report", host=host, kind="lost", headline=headline, code=1)

    def _on_torchrun(self, problem: str) -> None:
        """End the job: hosts of torchrun are done (""), or no host can go on with them."""
        with self._changing:
            if self._over:
                return
            self._over = True
            if problem:
                self._tell("report", host=-1, kind="ended", headline=problem, code=1)
            else:
                self._tell("finished")

    def _tell(self, message: str, /, **fields: Any) -> None:
        with self._sending:
            self._agent.send({"type": message, **fields})
