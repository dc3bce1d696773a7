"""This host's part in a job on several hosts: it meets the others, and speaks with the agent until the job has ended.

It lives in threads of the process that hosts stores (`launch.store_process`), since it needs torch. What happens once
the hosts have met is in `launch.hosts.job_membership`.

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
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from unisono.launch.channel import Channel, Message
from unisono.launch.hosts.addresses import HostAddresses
from unisono.launch.hosts.arrival import arrive
from unisono.launch.hosts.endpoint import HostRefusedError
from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.job_membership import JobMembership
from unisono.launch.hosts.meeting import Meeting
from unisono.launch.hosts.own_store import OwnStore
from unisono.launch.hosts.torchrun_peers import has_torchrun, watch_peers

__all__ = ["HostMember"]


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
        self._changing = threading.RLock()  # shared with the membership: held while a term begins or ends
        self._meeting: Meeting | None = None
        self._membership: JobMembership | None = None
        self._is_late = False  # the job ran already when this host came
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
            if self._membership is None or not self._membership.is_over:
                self._take({"type": "report", "kind": "lost", "headline": reason, "code": 1})

    def check(self) -> None:
        """Look whether the leader answers. Called several times a second."""
        membership = self._membership
        if membership is not None and (term := membership.term) is not None and not membership.is_over:
            term.check()

    def close(self) -> None:
        """Leave the others, and stay a moment if they still need the stores of this process."""
        meeting, membership = self._meeting, self._membership
        if membership is not None:
            membership.close()
        if meeting is not None and meeting.hosts_store and has_torchrun(meeting):
            time.sleep(1.0)  # torchrun closes the rendezvous at its end, and says nothing afterwards

    def _take(self, message: Message) -> None:
        with self._changing:
            membership = self._membership
            if membership is None or (term := membership.term) is None:
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
                membership.report(self._told_to_all(message))
            elif message["type"] == "finish":
                membership.finish()

    def _told_to_all(self, report: Message) -> dict[str, Any]:
        """Return what the others are told of how the job ends here. If this host only joins, it goes on there."""
        told = {key: value for key, value in report.items() if key not in ("type", "joins")}
        joins = report.get("joins", False)
        if self._is_late if joins is None else joins:
            told |= {"kind": "lost", "headline": f"has given up joining: {told['headline']}", "code": 1}
        return told

    def _live(self) -> None:
        try:
            own = OwnStore(self._addresses, self._settings.token, ranks=self._ranks, flags=self._flags)
            meeting, admission = arrive(
                self._settings,
                self._addresses,
                own,
                role=self._role,
                notice=lambda text: self._tell("notice", text=text),
                warn=lambda text: self._tell("warned", text=text),
            )
        except HostRefusedError as error:
            self._tell("refused", message=str(error))
            return
        self._meeting = meeting
        first = meeting.hellos[min(meeting.hellos)]
        self._membership = membership = JobMembership(
            self._settings, self._addresses, own, meeting, lock=self._changing, tell=self._tell
        )
        with self._changing:
            self._is_late = admission is not None
            membership.begin(admission)
            self._tell(
                "joined",
                place=asdict(meeting.place),
                names=meeting.names(),
                ranks={str(host): hello["ranks"] for host, hello in meeting.hellos.items()},
                nonce=first["nonce"],
                has_torchrun=has_torchrun(meeting),
                is_late=self._is_late,
            )
            while not self._early.empty():
                self._take(self._early.get())
        if has_torchrun(meeting):
            watch_peers(
                meeting,
                self._settings,
                is_over=lambda: membership.is_over or membership.is_done,
                found=membership.end_with_torchrun,
            )

    def _tell(self, message: str, /, **fields: Any) -> None:
        with self._sending:
            self._agent.send({"type": message, **fields})
