"""This host's part in a job on several hosts: it meets the others, then watches them until the job has ended.

It lives in a thread of the process that hosts stores (`launch.store_process`), since it needs torch. From the agent
come `report` (this host's end, for all) and `finish` (its ranks have succeeded); to the agent go `notice`, `warned`,
`refused`, `joined` (a `HostPlace`), `report` (of another host, or about one) and `finished` (the ranks of all hosts
have). Start reading at `HostMember._live`.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import queue
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import torch
from torch import distributed as dist

from unisono.launch.channel import Channel, Message
from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.comparison import find_difference
from unisono.launch.hosts.endpoint import HostRefusedError
from unisono.launch.hosts.meeting import Meeting, meet
from unisono.launch.hosts.settings import HostSettings
from unisono.machine import host_id

__all__ = ["HostMember"]

_POLL_S = 0.3
"""How often hosts look at what others have written. A report of this host goes out at once."""

_LINGER_S = 3.0
"""How long the host with the store stays for the others to read how the job has ended."""

_BARRIER = "torchelastic/agent/terminal_state"
"""The barrier at which torchrun's agents wait for each other at the end."""


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
        self._requests: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._meeting: Meeting | None = None
        self._peers: dict[int, dict[str, Any]] = {}  # by number, what the other hosts of unisono say of themselves
        self._round_s: float | None = None  # when the last exchange with the store has ended
        self._all_done = threading.Event()  # the ranks of all hosts have succeeded
        self._lost: set[int] = set()
        self._is_cut_off = False  # the store does not answer
        self._over = False  # the job has ended, or is about to, and all who can know do
        self._thread = threading.Thread(target=self._live, name="unisono-hosts", daemon=True)
        self._thread.start()

    def receive(self) -> bool:
        """Take the messages of the agent; return False if it is gone. Called by the process's loop."""
        for message, _ in self._agent.receive():
            self._requests.put(message)
        return not self._agent.closed

    def orphaned(self) -> None:
        """Tell the other hosts that this host's agent is gone: it told them nothing before."""
        self._requests.put({"type": "report", "kind": "lost", "headline": "its launcher was killed", "code": 1})

    def check(self) -> None:
        """Tell the agent if the store has not answered for too long. Called about once a second."""
        limit_s = self._settings.host_timeout_s
        if self._round_s is not None and not self._over and time.monotonic() - self._round_s > limit_s:
            self._cut_off(f"has not answered for {limit_s:g} s: that host, or the link to it, is down")

    def close(self) -> None:
        """Leave the others, and stay a moment if they still need the store of this process."""
        if self._is_cut_off:  # the thread may wait for an answer that never comes
            return
        self._requests.put({"type": "close"})
        self._thread.join(_LINGER_S + 2 * _POLL_S)

    def _live(self) -> None:
        try:
            self._meeting = meet(
                self._settings,
                self._addresses,
                ranks=self._ranks,
                role=self._role,
                hello=self._hello(),
                notice=lambda text: self._tell("notice", text=text),
                warn=lambda text: self._tell("warned", text=text),
            )
        except HostRefusedError as error:
            self._tell("refused", message=str(error))
            return
        except (RuntimeError, ValueError, OSError) as error:  # torch's DistError is a RuntimeError
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self._tell("refused", message=f"hosts could not meet at {self._settings.endpoint}: {reason}")
            return
        meeting = self._meeting
        if (problem := find_difference(meeting.hellos)) is not None:
            self._tell("refused", message=problem)
            return
        self._peers = {host: hello for host, hello in meeting.hellos.items() if host != meeting.place.host}
        self._tell(
            "joined", place=asdict(meeting.place), names={str(host): name for host, name in self._names().items()}
        )
        try:
            self._watch(meeting)
        except (RuntimeError, ValueError, OSError):
            if self._all_done.wait(1.0):  # torchrun, which served the store, has ended after all were done
                self._over = True
                self._tell("finished")
            self._cut_off("has closed its connection: its launcher has ended, or was killed")

    def _hello(self) -> dict[str, Any]:
        """Return what this host says of itself."""
        return {
            "name": f"{socket.gethostname()} ({self._addresses.local})",
            "address": self._addresses.local,
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

    def _watch(self, meeting: Meeting) -> None:
        """Exchange signs of life and reports with the other hosts until the job has ended."""
        lead = meeting.hellos[min(meeting.hellos)]["nonce"]
        store = dist.PrefixStore(f"unisono.{lead}", meeting.connect())  # type: ignore[attr-defined]
        beats: dict[int, bytes] = {}
        changed_s = dict.fromkeys(self._peers, time.monotonic())
        read, number, finishing = 0, 0, False
        self._round_s = time.monotonic()
        while True:
            request = self._next_request()
            if request is not None and request["type"] == "report":
                self._over = True
                self._publish(store, meeting, {**request, "host": meeting.place.host})
                store.set(f"done/{meeting.place.host}", "1")
            elif request is not None and request["type"] == "finish":
                finishing = True
                if meeting.store.add(f"{_BARRIER}/num_members", 1) == meeting.place.hosts:
                    meeting.store.set(f"{_BARRIER}/last_member", "<val_ignored>")
                threading.Thread(target=self._await_all, args=(meeting,), daemon=True).start()
            elif request is not None and request["type"] == "close":
                self._leave(store, meeting)
                return
            number += 1
            store.set(f"beat/{meeting.place.host}", str(number))
            gap_s = time.monotonic() - (self._round_s or 0.0)
            for host in self._peers:
                beat = store.get(f"beat/{host}") if store.check([f"beat/{host}"]) else b""
                # A pause of this process is none of the others.
                if beat != beats.get(host, b"") or gap_s > 2.0:
                    beats[host], changed_s[host] = beat, time.monotonic()
            count = store.add("reports", 0)
            while read < count and store.check([f"report/{read + 1}"]):
                read += 1
                report = json.loads(store.get(f"report/{read}"))
                if report["host"] != meeting.place.host:
                    self._over = True
                    store.set(f"done/{meeting.place.host}", "1")
                    self._tell("report", **{k: v for k, v in report.items() if k != "type"})
            self._round_s = time.monotonic()
            if finishing and self._all_done.is_set():
                finishing, self._over = False, True
                store.set(f"done/{meeting.place.host}", "1")
                self._tell("finished")
            if not self._over:
                self._look_for_lost(changed_s, meeting, finishing=finishing)

    def _await_all(self, meeting: Meeting) -> None:
        """Wait until the ranks of all hosts have succeeded.

        Not by polling: where torchrun serves the store, the store ends right after all have come.
        """
        try:
            meeting.store.wait([f"{_BARRIER}/last_member"], timedelta(days=365))
        except (RuntimeError, ValueError):
            return  # the other connection shows it, too
        self._all_done.set()

    def _look_for_lost(self, changed_s: Mapping[int, float], meeting: Meeting, *, finishing: bool) -> None:
        limit_s = self._settings.host_timeout_s
        for host, since_s in changed_s.items():
            if time.monotonic() - since_s > limit_s:
                self._over = True
                self._lost.add(host)
                headline = f"has not answered for {limit_s:g} s: it, or the link to it, is down"
                self._tell("report", host=host, kind="lost", headline=headline, code=1)
                return
        if meeting.handler is not None and self._has_torchrun(meeting) and not finishing:
            if meeting.handler.is_closed():
                self._over = True
                self._tell(
                    "report", host=-1, kind="ended", headline="a host started by torchrun has ended the job", code=1
                )
            elif meeting.handler.num_nodes_waiting() > 0:
                self._over = True
                headline = "a host wants to join, or torchrun starts its ranks anew; unisono does not follow yet"
                self._tell("report", host=-1, kind="ended", headline=headline, code=1)

    def _publish(self, store: Any, meeting: Meeting, report: Mapping[str, Any]) -> None:
        number = store.add("reports", 1)
        store.set(f"report/{number}", json.dumps({**report, "name": meeting.hello["name"]}))

    def _leave(self, store: Any, meeting: Meeting) -> None:
        """Note that this host needs the others no more; where it hosts a store, wait for them to say the same."""
        store.set(f"done/{meeting.place.host}", "1")
        deadline_s = time.monotonic() + _LINGER_S
        if meeting.handler is not None:
            meeting.handler.shutdown()  # so that torchrun, which does not know of reports, starts no ranks anew
        if not meeting.hosts_store:
            return
        waiting = self._peers.keys() - self._lost
        while waiting and time.monotonic() < deadline_s:
            waiting = {host for host in waiting if not store.check([f"done/{host}"])}
            time.sleep(_POLL_S / 3)
        if self._has_torchrun(meeting):
            time.sleep(1.0)  # torchrun closes the rendezvous at its end, and says nothing afterwards

    def _has_torchrun(self, meeting: Meeting) -> bool:
        return len(self._peers) + 1 < meeting.place.hosts

    def _next_request(self) -> Message | None:
        try:
            return self._requests.get(timeout=_POLL_S)
        except queue.Empty:
            return None

    def _cut_off(self, what: str) -> None:
        if not self._over:
            self._over = self._is_cut_off = True
            headline = f"the host of the rendezvous, {self._settings.endpoint}, {what}"
            self._tell("report", host=-1, kind="lost", headline=headline, code=1)

    def _tell(self, message: str, /, **fields: Any) -> None:
        with self._sending:
            self._agent.send({"type": message, **fields})
