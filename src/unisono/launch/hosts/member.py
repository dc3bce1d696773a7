"""This host's part in a job on several hosts: it meets the others, then watches them until the job has ended.

It lives in threads of the process that hosts stores (`launch.store_process`), since it needs torch. Each host serves a
store of its own; the one of the leader, the host with the lowest number at first, has the log in which all tell each
other what happens (`launch.hosts.term`). If the leader is lost, the next host takes its place.

From the agent come `report` (this host's end, for all), `finish` (its ranks have succeeded), `say` (for the agents of
all hosts) and `say to leader`; to the agent go `notice`, `warned`, `refused`, `joined` (a `HostPlace`), `hosts` (who is
there), `said` (what an agent has told), `report` (of another host, or about one) and `finished` (the ranks of all hosts
have). Start reading at `HostMember._live`.
"""

from __future__ import annotations

import logging
import os
import platform
import queue
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch import distributed as dist

from unisono.launch.channel import Channel, Message
from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.comparison import find_difference
from unisono.launch.hosts.election import Election, silence
from unisono.launch.hosts.endpoint import HostRefusedError, listen
from unisono.launch.hosts.guarded_port import GuardedPort, LocalPort, refuses
from unisono.launch.hosts.meeting import Meeting, meet
from unisono.launch.hosts.quorum import find_obstacle
from unisono.launch.hosts.settings import HostSettings
from unisono.launch.hosts.term import STORE_ERRORS, Term
from unisono.launch.hosts.torchrun_peers import await_all, find_problem, has_torchrun
from unisono.machine import host_id
from unisono.tcp_store import LOOPBACK, serve_store

__all__ = ["HostMember"]

_LINGER_S = 3.0
"""How long the host with the store stays for the others to read how the job has ended."""

_GOODBYE_S = 0.1
"""How long to wait for the last words of a host that has closed its connection."""

_TORCHRUN_S = 0.3
"""How often to look what hosts of torchrun do."""


class HostMember:
    """One host of a job.

    Args:
        settings: Where hosts meet.
        addresses: The addresses of this host.
        ranks: The number of ranks of this host.
        role: ROLE_NAME of these ranks.
        agent: The channel to the agent.
    """

    def __init__(
        self, settings: HostSettings, addresses: HostAddresses, *, ranks: int, role: str, agent: Channel
    ) -> None:
        # Its warnings are about what the agent tells in a sentence.
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        self._settings, self._addresses, self._agent = settings, addresses, agent
        self._ranks, self._role = ranks, role
        self._early: queue.SimpleQueue[Message] = queue.SimpleQueue()  # from the agent, before there is a term
        self._sending = threading.Lock()
        self._changing = threading.RLock()  # held while a term begins or ends
        self._meeting: Meeting | None = None
        self._way: LocalPort | None = None
        self._term: Term | None = None
        self._members: set[int] = set()
        self._known: set[int] = set()
        """The latest members that all of them are known to know: a smaller set could be counted against twice."""
        self._agreed: set[int] = set()  # on the leader: those of the members that know who they are
        self._ended: set[int] = set()  # hosts that are known to have ended
        self._finished: set[int] = set()  # hosts whose ranks have succeeded
        self._is_done = False  # the ranks of this host have succeeded
        self._over = False  # the job has ended, or is about to, and all who can know do
        self._thread = threading.Thread(target=self._live, name="unisono-hosts", daemon=True)
        self._thread.start()

    def receive(self) -> bool:
        """Take the messages of the agent; return False if it is gone. Called by the process's loop."""
        for message, _ in self._agent.receive():
            self._take(message)
        return not self._agent.closed

    def orphaned(self) -> None:
        """Tell the other hosts that this host's agent is gone: it told them nothing before."""
        self._take({"type": "report", "kind": "lost", "headline": "its launcher was killed", "code": 1})

    def check(self) -> None:
        """Look whether the leader answers. Called several times a second."""
        term = self._term
        if term is not None and not self._over:
            term.check()

    def close(self) -> None:
        """Leave the others, and stay a moment if they still need the stores of this process."""
        meeting, term = self._meeting, self._term
        if meeting is not None and meeting.handler is not None and term is not None:
            # So that torchrun, which does not know of reports, starts no ranks anew. It may wait for a lost endpoint.
            closing = threading.Thread(target=_close_rendezvous, args=(meeting.handler,), daemon=True)
            closing.start()
            closing.join(1.0)
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
            elif message["type"] == "report":
                self._over = True
                term.say({"do": "report", **{k: v for k, v in message.items() if k != "type"}})
            elif message["type"] == "finish":
                self._is_done = True
                term.say({"do": "finished"})

    def _live(self) -> None:
        own = self._serve()
        try:
            self._meeting = meeting = meet(
                self._settings,
                self._addresses,
                ranks=self._ranks,
                role=self._role,
                hello=self._hello(own),
                notice=lambda text: self._tell("notice", text=text),
                warn=lambda text: self._tell("warned", text=text),
            )
        except HostRefusedError as error:
            self._tell("refused", message=str(error))
            return
        except STORE_ERRORS as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._tell("refused", message=f"hosts could not meet at {self._settings.endpoint}: {reason}")
            return
        if (problem := find_difference(meeting.hellos)) is not None:
            self._tell("refused", message=problem)
            return
        meeting.servers.append(own)
        first = meeting.hellos[min(meeting.hellos)]
        with self._changing:
            self._begin(0, min(meeting.hellos), set(meeting.hellos), lost={})
            self._tell(
                "joined",
                place=asdict(meeting.place),
                names={str(host): name for host, name in self._names().items()},
                ranks={str(host): hello["ranks"] for host, hello in meeting.hellos.items()},
                nonce=first["nonce"],
                has_torchrun=has_torchrun(meeting),
            )
            while not self._early.empty():
                self._take(self._early.get())
        if has_torchrun(meeting):
            self._watch_torchrun(meeting)

    def _serve(self) -> Any:
        """Serve a store of this host's own, and return it."""
        if not self._settings.token:
            return serve_store(self._addresses.local, listen(self._addresses.local, 0))
        store = serve_store(LOOPBACK, listen(LOOPBACK, 0))
        self._guarded = listen(self._addresses.local, 0)
        GuardedPort(self._guarded, store.port, self._settings.token, refused=lambda _: None)
        return store

    def _hello(self, own: Any) -> dict[str, Any]:
        """Return what this host says of itself."""
        self._own_port = own.port
        port = self._guarded.getsockname()[1] if self._settings.token else own.port
        return {
            "name": f"{socket.gethostname()} ({self._addresses.local})",
            "address": self._addresses.local,
            "store": port,
            "system": host_id(with_network=True),
            "pid": os.getpid(),
            "ranks": self._ranks,
            "nonce": secrets.token_hex(8),
            "versions": {
                "unisono": version("unisono"),
                "torch": str(torch.__version__),
                "Python": ".".join(platform.python_version_tuple()[:2]),
            },
        }

    def _names(self) -> dict[int, str]:
        assert self._meeting is not None
        return {
            host: str(hello["name"]) if (hello := self._meeting.hellos.get(host)) else "(torchrun)"
            for host in range(self._meeting.place.hosts)
        }

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
            return (LOOPBACK if self._settings.token else self._addresses.local), self._own_port
        hello = self._meeting.hellos[leader]
        self._way = LocalPort((hello["address"], hello["store"]), self._settings.token)
        return LOOPBACK, self._way.port

    def _begin(self, number: int, leader: int, members: Collection[int], *, lost: Mapping[int, str]) -> None:
        """Begin a term. The lock is held."""
        self._store_at = self._open(leader)
        self._members, self._finished, self._agreed = set(members), set(), set()
        self._known = self._known or self._members
        term = Term(
            number,
            leader,
            self._host,
            members=members,
            connect=lambda: _connect(self._store_at, f"term/{number}"),
            timeout_s=self._settings.host_timeout_s,
            told=lambda host, entry: self._on_entry(term, host, entry),
            silent=lambda hosts: self._exclude(dict.fromkeys(hosts, silence(self._settings)), ended=False),
            broken=lambda reason: self._on_broken(term, reason),
        )
        self._term = term
        term.begin()
        term.say_to_leader({"do": "agreed", "members": sorted(members)})
        self._tell_hosts(lost)
        if leader == self._host:
            for host in self._members - {self._host}:
                threading.Thread(
                    target=self._await_end, args=(term, host), name="unisono-host-end", daemon=True
                ).start()
        if self._is_done:
            term.say({"do": "finished"})

    def _tell_hosts(self, lost: Mapping[int, str]) -> None:
        assert self._term is not None
        self._tell(
            "hosts",
            term=self._term.number,
            leader=self._term.leader,
            members=sorted(self._members),
            lost={str(host): reason for host, reason in lost.items()},
            store=list(self._store_at),
        )

    def _on_entry(self, term: Term, host: int, entry: dict[str, Any]) -> None:
        with self._changing:
            if term is not self._term or host not in self._members:
                return
            do = entry["do"]
            if do == "report":
                self._on_report(term, host, entry)
            elif do == "members":
                self._on_members(term, host, entry)
            elif do == "agreed":
                if set(entry["members"]) == self._members:
                    self._agreed.add(host)
                if self._agreed == self._members:
                    term.say({"do": "known", "members": sorted(self._members)})
            elif do == "known":
                if set(entry["members"]) == self._members:
                    self._known = set(self._members)
            elif do == "finished":
                self._finished.add(host)
                self._look_whether_done()
            else:
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
            self._over = True
            report = {k: v for k, v in entry.items() if k != "do"}
            self._tell("report", **{"host": host, **report})

    def _on_members(self, term: Term, leader: int, entry: Mapping[str, Any]) -> None:
        """Go on with the hosts that the leader names. The lock is held."""
        if self._host not in entry["members"]:
            self._over = True
            headline = "has gone on without this host, which did not answer in time"
            self._tell("report", host=leader, kind="lost", headline=headline, code=1)
            return
        self._members = set(entry["members"])
        term.watch(self._members)
        term.say_to_leader({"do": "agreed", "members": entry["members"]})
        self._tell_hosts(entry["lost"])
        self._look_whether_done()

    def _look_whether_done(self) -> None:
        meeting = self._meeting
        assert meeting is not None
        if self._members <= self._finished and not self._over:
            if has_torchrun(meeting):
                threading.Thread(target=self._await_torchrun, args=(meeting,), daemon=True).start()
            else:
                self._over = True
                self._tell("finished")

    def _exclude(self, lost: Mapping[int, str], *, ended: bool) -> None:
        """Go on without some hosts, or end the job. Only on the leader."""
        with self._changing:
            gone = self._members.intersection(lost) - {self._host}
            if self._over or not gone or self._term is None:
                return
            rest = self._members - gone
            if ended:
                self._ended |= gone
            least = self._settings.min_hosts
            if obstacle := find_obstacle(self._known, reachable=rest, ended=self._ended, min_hosts=least):
                host = min(gone)
                headline = f"{lost[host]}; {obstacle}" if least < self._settings.max_hosts else lost[host]
                self._term.say({"do": "report", "kind": "lost", "host": host, "headline": headline, "code": 1})
                # The others may be those that do not answer.
                self._over = True
                self._tell("report", host=host, kind="lost", headline=headline, code=1)
            else:
                self._members, self._agreed = rest, set()
                self._term.watch(rest)
                reasons = {str(host): lost[host] for host in gone}
                self._term.say({"do": "members", "members": sorted(rest), "lost": reasons})

    def _await_end(self, term: Term, host: int) -> None:
        """Wait at the store of a host, which closes the connection if all of its launcher is killed. On the leader."""
        assert self._meeting is not None
        hello = self._meeting.hellos[host]
        way = LocalPort((hello["address"], hello["store"]), self._settings.token)
        with suppress(*STORE_ERRORS):
            _connect((LOOPBACK, way.port), "never").wait(["never"], timedelta(days=365))
        has_left = True
        if way.has_ended and term is self._term and self._has_ended(host):
            with suppress(*STORE_ERRORS):
                has_left = _connect(self._store_at, f"term/{term.number}").check([f"done/{host}"])
        if not has_left:
            self._exclude({host: "has closed its connection: its launcher has ended, or was killed"}, ended=True)
        way.close()

    def _has_ended(self, host: int) -> bool:
        """Return True if a host that has closed a connection refuses others, a moment later: it may say why before."""
        assert self._meeting is not None
        hello = self._meeting.hellos[host]
        time.sleep(_GOODBYE_S)
        return refuses((hello["address"], hello["store"]), timeout_s=1.0)

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
        election = Election(
            term.number + 1,
            host=self._host,
            members=self._members,
            known=self._known,
            lost=lost,
            ended=self._ended | ended,
            settings=self._settings,
            open_way=self._open_anew,
            connect=lambda where, prefix, timeout_s: _connect(where, prefix, timeout_s=timeout_s),
            has_ended=self._has_ended,
        )
        verdict = election.run()
        with self._changing:
            if self._term is not term or self._over:
                return
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

    def _watch_torchrun(self, meeting: Meeting) -> None:
        """Look what hosts of torchrun do."""
        problem = ""
        while not self._over and not problem:
            time.sleep(_TORCHRUN_S)
            problem = "" if self._is_done else find_problem(meeting, self._settings)
        with self._changing:
            if problem and not self._over:
                self._over = True
                self._tell("report", host=-1, kind="ended", headline=problem, code=1)

    def _await_torchrun(self, meeting: Meeting) -> None:
        """Wait until the ranks of all hosts have succeeded, also those of torchrun."""
        came = await_all(meeting)
        with self._changing:
            if came and not self._over:
                self._over = True
                self._tell("finished")

    def _tell(self, message: str, /, **fields: Any) -> None:
        with self._sending:
            self._agent.send({"type": message, **fields})


def _connect(where: tuple[str, int], prefix: str, *, timeout_s: float = 10.0) -> Any:
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return dist.PrefixStore(f"unisono/{prefix}", store)  # type: ignore[attr-defined]


def _close_rendezvous(handler: Any) -> None:
    with suppress(*STORE_ERRORS):
        handler.shutdown()
