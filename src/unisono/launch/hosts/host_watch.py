"""The agent's actions for other hosts: it ends its ranks when they tell of an end, and tells them of its own.

The agent's loop calls. Start reading at `HostWatch.on_message`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from unisono.launch.channel import Message
from unisono.launch.failure.postmortem import Postmortem
from unisono.launch.failure.root_cause import RootCause
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.hosts.host_activity import HostActivity
from unisono.launch.hosts.host_hangs import HostHangs
from unisono.launch.hosts.host_replacing import HostReplacing
from unisono.launch.hosts.host_restarting import HostRestarting
from unisono.launch.hosts.host_settings import HostPlace
from unisono.launch.hosts.host_stacks import HostStacks
from unisono.launch.hosts.job_hosts import JobHosts
from unisono.launch.job_shutdown import JobShutdown
from unisono.launch.output.relay import Relay
from unisono.launch.replacing import Replacing
from unisono.launch.restarts import Decision, Ending
from unisono.launch.shutdown import Shutdown
from unisono.text import name_ranks

__all__ = ["HostWatch"]

_COMPANY_S = 1.0
"""How long to wait, when a rank elsewhere has failed, for the same error of ranks here, whose report says more."""

_BLAME_S = 3.0
"""How long to wait, if ranks here only lost a peer, for another host to tell that a rank there was the cause."""


class HostWatch:
    """The other hosts of a job, for its agent.

    Args:
        hosts: The channel to them.
        generation: Returns the ranks of this host; None before they have been started.
        replacing: Returns what replaces ranks; None before they have been started.
        joined: Called when all hosts have met, with the place of this one.
        examine: Returns the report on the ranks, of which one has failed.
        conclude: Reports the failure of ranks that have all ended.
        decide: Returns how ranks have ended, given the cause (None: the loss of a host), and whether all are started
            again.
        restart: Starts the ranks again, given what has failed as words, how it ended and the number of the latest
            decision on who the ranks are.
    """

    def __init__(
        self,
        hosts: JobHosts,
        *,
        relay: Relay,
        server: ForkServerHandle,
        shutdown: JobShutdown,
        generation: Callable[[], Generation | None],
        replacing: Callable[[], Replacing | None],
        joined: Callable[[HostPlace], None],
        examine: Callable[[], Postmortem],
        conclude: Callable[[], None],
        decide: Callable[[RootCause | None], tuple[Ending, Decision]],
        restart: Callable[[str, Ending, int], None],
    ) -> None:
        self._hosts, self._relay, self._server, self._shutdown = hosts, relay, server, shutdown
        self._generation, self._joined, self._examine, self._conclude = generation, joined, examine, conclude
        self._replacing, self._decide, self._restart = replacing, decide, restart
        self.restarting = HostRestarting(
            hosts, end=self._end_to_restart, number=lambda: self._number, start=self._start_again
        )
        """The restarts of the job."""
        hosts.restart_without = self._restart_without
        self.stacks = HostStacks(hosts, generation)
        """What `unisono stacks` shows."""
        self.activity = HostActivity(hosts, generation, lambda: relay.progress)
        """What `unisono top` shows."""
        self._hangs: HostHangs | None = None
        self._heard: list[tuple[int, dict[str, Any]]] = []
        self._is_placed = False
        self._began_term = 0  # the term in which this host asked to join a running job
        self._changed = False  # other hosts are there than at the start
        self._blame_s: float | None = None  # when `tick` stops waiting for another host to tell the cause
        self._report_s: float | None = None  # when `tick` acts on the failure of a rank elsewhere

    @property
    def deadline_s(self) -> float | None:
        """When `tick` is due, by the monotonic clock; None: nothing is waited for."""
        due = (self._blame_s, self._report_s, self.activity.deadline_s)
        return min((due_s for due_s in due if due_s is not None), default=None)

    @property
    def channel(self) -> JobHosts:
        """The other hosts, to talk to."""
        return self._hosts

    @property
    def has_met(self) -> bool:
        """True if all hosts have come, and it is known which ranks this one has."""
        return self._is_placed

    def on_message(self) -> bool:
        """Act on what has been told; return False if nothing can follow."""
        hosts = self._hosts
        for message in hosts.receive():
            kind = message["type"]
            if kind == "notice" and self._generation() is None:
                self._relay.notice(message["text"])
            elif kind == "warned":
                self._relay.say(message["text"])
            elif kind == "refused" and self._shutdown.state is None:
                self._shutdown.begin(Shutdown(code=2, reason=message["message"]), signal.SIGTERM, ())
            elif kind == "shown":
                self.activity.on_shown(message["hosts"])
            elif kind in ("joined", "hosts", "said"):
                self._on_hosts(message)
            elif kind == "report" and hosts.report is not None and hosts.report.kind == "failed":
                self._report_s = time.monotonic() + _COMPANY_S
            elif kind == "report":
                self._on_report()
            elif kind == "finished" and hosts.joins:
                self._leave("the run has ended", code=0)
            elif kind == "finished" and self._shutdown.state is None:
                self._server.end()
        return not hosts.channel.closed

    def _on_hosts(self, message: Message) -> None:
        """Act on who is there, and what agents have told."""
        hosts = self._hosts
        if message["type"] == "joined" and hosts.place is not None:
            self._began_term = hosts.term
            if hosts.joins:
                self._relay.notice("unisono: waiting for a place in the running job ...")
            else:
                self._place(hosts.place, hosts.describe())
        elif message["type"] == "hosts":
            self._changed = hosts.term > 0 or bool(hosts.lost) or bool(hosts.newcomers)
            if hosts.joins and self._is_placed and hosts.term != self._began_term:
                self._leave(f"{hosts.name(hosts.leader)}, leads the job now; start this host again", code=1)
            if not hosts.joins:
                self.restarting.on_hosts()
            self._pass_on()
        elif message["type"] == "said":
            self._on_said(message["host"], message["entry"])

    def _on_said(self, host: int, entry: dict[str, Any]) -> None:
        """Act on what an agent has told."""
        if self._is_about_this_host(entry):
            self._on_invitation(entry)
        elif entry["do"] in HostStacks.MESSAGES:
            self.stacks.on_said(host, entry)
        elif entry["do"] in HostActivity.MESSAGES:
            self.activity.on_said()
        elif entry["do"] in HostRestarting.MESSAGES and not self._hosts.joins:
            self.restarting.on_said(host, entry)
        elif entry["do"] in HostRestarting.MESSAGES and self._is_placed:
            self._leave("the ranks of the job start again; start this host again", code=1)
        elif entry["do"] in HostRestarting.MESSAGES or self.restarting.is_agreed:
            return  # this host has no part in that, or the ranks that it is about end
        elif entry["do"] in HostHangs.MESSAGES:
            if self._hangs is not None:
                self._hangs.on_said(host, entry)
        else:
            self._heard.append((host, entry))
            self._pass_on()

    def tick(self) -> None:
        """Tell the other hosts once that the job ends here, as soon as the cause is known; look for hangs before."""
        self._pass_on()
        self._look_for_hangs()
        self.activity.tick()
        now_s = time.monotonic()
        if self._report_s is not None and now_s >= self._report_s:
            self._report_s = None
            self._on_report()
        if self._blame_s is not None and now_s >= self._blame_s:
            self._stop_waiting()
        hosts, shutdown, generation = self._hosts, self._shutdown.state, self._generation()
        if shutdown is None or hosts.told or hosts.report is not None:
            return
        if not shutdown.failed or (shutdown.reason and self.restarting.is_under_way):
            self._shutdown.state = shutdown = replace(shutdown, failed=False)
            hosts.tell("ended", shutdown.reason or "the launcher ended the job; its terminal says why", shutdown.code)
            if generation is not None and not self._shutdown.running:
                self._server.end()
        elif self.restarting.is_under_way:
            return
        elif generation is not None and generation.failed and not (verdict := generation.judge()).lost:
            self.tell_failure(self._examine(), verdict)

    def on_success(self) -> None:
        """Wait for the ranks of the other hosts: those of this one have succeeded."""
        if self._hosts.joins:
            self._leave("its ranks ended without a Trainer, with which they would have joined the others", code=1)
            return
        self._hosts.finish()
        self._relay.notice("unisono: the ranks of this host are done; waiting for the other hosts ...")

    def awaits_cause(self, generation: Generation) -> bool:
        """Return True if another host may yet tell the cause of a failure here, and `conclude` is called later."""
        if self._hosts.report is None and generation.judge().lost:
            self._blame_s = time.monotonic() + _BLAME_S
            return True
        return False

    def takes_blame(self, verdict: RootCause, *, ranks: int) -> bool:
        """End the job with the cause that another host has told, if ranks here only lost a peer; otherwise do nothing.

        Args:
            ranks: The number of ranks of this host, for the message.
        """
        report, state = self._hosts.report, self._shutdown.state
        if report is None or state is None or not verdict.lost:
            return False
        self._shutdown.state = replace(state, failed=False, code=report.code, reason=report.reason, ranks=ranks)
        self._server.end()
        return True

    def tell_failure(self, postmortem: Postmortem, verdict: RootCause) -> None:
        """Tell the other hosts that a rank of this one has failed, or ask them to start all ranks again."""
        ending, decision = self._decide(verdict)
        if decision.restart:
            self.restarting.ask(postmortem.headline, ending)
        else:
            self._hosts.tell("failed", postmortem.headline, verdict.code)

    def _place(self, place: HostPlace, where: str) -> None:
        """Let ranks start: they are known by now."""
        self._relay.begin_at(place.first_rank)
        self._relay.say(where)
        self._is_placed = True
        self._joined(place)

    def _is_about_this_host(self, entry: Mapping[str, Any]) -> bool:
        place = self._hosts.place
        return entry["do"] in ("invite", "turn away") and place is not None and entry["host"] == place.host

    def _on_invitation(self, entry: Mapping[str, Any]) -> None:
        """Start the ranks of this host, which joins a running job; or end, if it cannot."""
        if entry["do"] == "turn away":
            self._leave(f"{entry['reason']}; start it on the hosts that it has, or wait until it ends", code=2)
        elif self._shutdown.state is None:
            place = self._hosts.accept(entry)
            names = name_ranks(place.ranks)
            self._place(place, f"joins the running job as host {entry['host']}: {names} of {place.world_size}")

    def _leave(self, reason: str, *, code: int) -> None:
        """End the ranks of this host, which has not joined the job; the others go on, or are done."""
        if self._shutdown.state is None:
            running = self._shutdown.running if self._generation() is not None else ()
            told = f"this host has not joined the job: {reason}"
            self._shutdown.begin(Shutdown(code=code, reason=told, ranks=len(running)), signal.SIGTERM, running)
            if not running:
                self._server.end()

    def _pass_on(self) -> None:
        """Pass on what concerns ranks, once there are some: changes of hosts, and what agents have told."""
        replacing = self._replacing()
        if not isinstance(replacing, HostReplacing):
            return
        if self._changed and self._shutdown.state is None:
            self._changed = False
            replacing.on_hosts()
        while self._heard:
            replacing.on_said(*self._heard.pop(0))

    def _look_for_hangs(self) -> None:
        generation = self._generation()
        if generation is None or self._shutdown.state is not None:
            return
        if self._hangs is None:
            self._hangs = HostHangs(self._hosts, generation, self._relay)
        self._hangs.tick()

    def _on_report(self) -> None:
        """End the ranks of this host because the job has ended on another one."""
        report, state, running = self._hosts.report, self._shutdown.state, self._shutdown.running
        generation = self._generation()
        assert report is not None
        if self.restarting.is_under_way and state is not None:
            self._shutdown.state = replace(
                state, failed=False, code=report.code, reason=state.reason or report.reason, ranks=len(running)
            )
            if not running:
                self._server.end()
        elif state is None and generation is not None and generation.observer.abort:
            return  # all agents end the job for a hang; another one has told of its end before this one began
        if self._blame_s is not None:
            self._stop_waiting()
        elif state is None and generation is not None:
            reason = Shutdown(
                code=report.code, reason=report.reason, ranks=len(running), host_lost=report.kind == "lost"
            )
            self._shutdown.begin(reason, signal.SIGTERM, running)
            if not running:  # they have succeeded, and waited for those of other hosts
                self._server.end()
        elif state is None and self._hosts.joins:
            self._leave(report.reason, code=report.code)
        elif state is not None and state.failed:
            self._shutdown.end_failed()

    @property
    def _number(self) -> int:
        replacing = self._replacing()
        return 0 if replacing is None else replacing.number

    def _end_to_restart(self, code: int) -> None:
        """End the ranks of this host, since those of all hosts are about to start again."""
        state, running = self._shutdown.state, self._shutdown.running
        self._blame_s = None
        if self._generation() is None:
            self._is_placed = False  # they have not been started, and are not before the others start again
        elif state is None:
            self._shutdown.begin(Shutdown(code=code, failed=True), signal.SIGTERM, running)
        elif state.failed and running:
            self._shutdown.end_failed()
        if not running:
            self.restarting.ranks_ended()

    def _restart_without(self, what: str) -> bool:
        """Ask all hosts to start the ranks again without a host that is lost; return False if they must not."""
        ending, decision = self._decide(None)
        if not decision.restart or not self._hosts.replaces:
            return self.restarting.is_under_way
        self.restarting.ask(what, ending, names_host=True)
        return True

    def _start_again(self, what: str, ending: Ending, number: int) -> None:
        self._hangs = self._report_s = None
        self._changed = self._is_placed = True
        self._restart(what, ending, number)

    def _stop_waiting(self) -> None:
        self._blame_s = None
        self._conclude()
