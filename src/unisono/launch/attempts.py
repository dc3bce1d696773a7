"""The attempts of a job: all ranks start, and when they have ended, they start again or the job finishes.

`Generation` is the state of one attempt, and `RankChanges` replaces ranks within it. What lasts longer is here: the
number of restarts, how the attempt before has ended, the replacements so far and the report on a failure. The agent's
loop calls. Start reading at `Attempts.start_when_met`, then at `Attempts.on_exit`.
"""

from __future__ import annotations

import selectors
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unisono.launch.failure.postmortem import Postmortem, write_report
from unisono.launch.failure.root_cause import RootCause
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.job_shutdown import JobShutdown
from unisono.launch.launch_job import LaunchJob
from unisono.launch.output.relay import Relay
from unisono.launch.rank_changes import RankChanges
from unisono.launch.restarts import Decision, Ending, decide_restart
from unisono.launch.shutdown import Shutdown
from unisono.memory import MemoryCounters
from unisono.text import name_ranks

if TYPE_CHECKING:
    from unisono.launch.hosts.host_settings import HostPlace
    from unisono.launch.hosts.host_watch import HostWatch

__all__ = ["Attempts"]


class Attempts:
    """The attempts of a job, one after the other.

    Args:
        job: The job as it was asked for.
        memory: The kernel's counters at the job's start.
        visible_gpus: CUDA_VISIBLE_DEVICES of the launcher; None if it is not set.
        completed: See `Replacing`.
    """

    def __init__(
        self,
        job: LaunchJob,
        *,
        server: ForkServerHandle,
        shutdown: JobShutdown,
        relay: Relay,
        selector: selectors.BaseSelector,
        memory: MemoryCounters,
        visible_gpus: str | None,
        completed: Callable[[dict[str, Any]], None],
    ) -> None:
        self._server, self._shutdown, self._relay, self._selector = server, shutdown, relay, selector
        self._memory, self._visible_gpus, self._completed = memory, visible_gpus, completed
        self._asked = job
        self.job = job
        """The job with its present number of ranks."""
        self.restarts = 0
        """How often all ranks have been started again."""
        self.generation: Generation | None = None
        """The ranks of the present attempt; None before the first."""
        self.changes: RankChanges | None = None
        """What replaces these ranks; None before the first attempt."""
        self.recoveries: list[dict[str, Any]] = []
        """What `Replacing` has told about each replacement so far."""
        self.postmortem: Postmortem | None = None
        """The report on the failure that ends the job; None if there is none, or another host's agent has it."""
        self._ending: Ending | None = None
        self._hosts: HostWatch | None = None

    def join(self, hosts: HostWatch) -> None:
        """Let other hosts have a say: no attempt begins before they have come."""
        self._hosts = hosts

    @property
    def _now(self) -> Generation:
        assert self.generation is not None, "a rank spoke before there was one"
        return self.generation

    @property
    def _ranks(self) -> RankChanges:
        assert self.changes is not None, "a rank spoke before there was one"
        return self.changes

    def place(self, place: HostPlace) -> None:
        """Give this host its place among several, and start its ranks if all else is ready."""
        self.job = self._asked = replace(self.job, place=place, ranks=len(place.ranks) or self.job.ranks)
        self.restarts = 0 if self._hosts is None else self._hosts.channel.attempt
        self.start_when_met()

    def start_when_met(self) -> None:
        """Start the ranks once there is a fork server and, if there are other hosts, their agents have come."""
        have_met = self._hosts is None or self._hosts.has_met
        if self._server.pid and have_met and self.generation is None and self._shutdown.state is None:
            self._start()

    def _start(self, number: int = 0) -> None:
        hosts = None if self._hosts is None else self._hosts.channel
        self.generation = generation = Generation(
            self.job, attempt=self.restarts, relay=self._relay, secret=None if hosts is None else hosts.secret
        )
        self.changes = RankChanges(
            self.job,
            generation,
            server=self._server,
            relay=self._relay,
            selector=self._selector,
            number=number if self.changes is None else max(number, self.changes.replacing.number),
            completed=self._on_recovered,
            lost=self._shutdown.begin_for_loss,
            port=self._server.port,
            visible_gpus=self._visible_gpus,
            hosts=hosts,
        )
        self._shutdown.cover(generation, self.changes.spares)
        self.changes.start()

    def tick(self) -> None:
        """Do what is due: report a hang, replace ranks, change their number."""
        if self.generation is not None:
            self._look_for_hang(self.generation)
        if self.changes is not None and self._shutdown.state is None:
            if not self.changes.tick():
                self._on_failed()
                if not self._shutdown.running:
                    self._on_ranks_end()
            if (size := len(self._now.ranks)) != self.job.ranks:  # also for a restart
                is_alone = size == 1 and self._hosts is None
                self.job = replace(self._asked, ranks=size, spares=0 if is_alone else self._asked.spares)

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is due, by the monotonic clock; None if nothing is under way."""
        deadlines = [None if self.generation is None else self.generation.observer.next_deadline_s()]
        if self.changes is not None and self._shutdown.state is None:
            deadlines.append(self.changes.next_deadline_s())
        return min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=None)

    def _look_for_hang(self, generation: Generation) -> None:
        observer = generation.observer
        for text in observer.tick():
            self._relay.show(text)
        if observer.abort and self._shutdown.state is None:
            self._end_for_hang(observer.abort)
        elif self._shutdown.state is None and (stuck := observer.take_stuck()):
            self._relay.say(
                f"{name_ranks(stuck)} kept the others waiting for {observer.judge.stuck_s:g} s; killed "
                "(--stuck-timeout)"
            )
            own = [rank for rank in stuck if rank in generation.ranks]  # others are on other hosts
            self._server.signal(signal.SIGKILL, own, group=True)

    def _end_for_hang(self, hang: str) -> None:
        self._shutdown.begin(Shutdown(code=1), signal.SIGTERM, self._shutdown.running)
        report = {
            "run_id": self.job.run_id,
            "ranks": self.job.ranks,
            "headline": hang,
            "exit_code": 1,
            "hang": self._now.observer.report,
            "restarts": self.restarts,
            "max_restarts": self.job.max_restarts,
            "recoveries": self.recoveries,
        }
        write_report(report, relay=self._relay, attempt=self._now.attempt)
        self._relay.say(f"ending the job: ranks still wait, and --hang-abort is {self._now.observer.judge.abort_s:g} s")

    def on_started(self, rank: int, pid: int) -> None:
        """Handle the start of a rank's process."""
        self._now.started(rank, pid)

    def on_unstarted(self, rank: int, problem: str) -> None:
        """Handle a rank that could not be forked. No rank after it is forked."""
        self._now.running.discard(rank)
        if self._ranks.resizing.on_unstarted(rank, problem):
            return
        if self._ranks.replacing.is_new(rank):
            self._shutdown.begin_for_loss(f"rank {rank} could not be started in the place of one that died: {problem}")
        else:
            self._shutdown.begin_for_loss(
                f"rank {rank} could not be started, {self._now.local_rank(rank)} of {self.job.ranks} were: {problem}"
            )
        if not self._shutdown.running:
            self._on_ranks_end()

    def on_failing(self, rank: int, code: int, time_ns: int) -> None:
        """Handle the failure of a rank whose process still runs."""
        self._now.failing(rank, code, time_ns)
        if self._now.failed:
            self._on_failed()

    def on_exit(self, rank: int, code: int, time_ns: int) -> None:
        """Handle the end of a rank's process."""
        # Its output comes before messages about it.
        self._relay.drain({rank})
        if self._shutdown.state is not None or code != 0:
            self._relay.shut(rank)
        self._now.ended(rank, code, time_ns)
        self._ranks.on_exit(rank, code)
        lost = self._shutdown.state is None and self._ranks.replacing.left_without_joining(rank)
        if rank in self._now.failed or lost:
            self._on_failed()
        # With state None and failures, other hosts have a say in what becomes of them.
        if not self._shutdown.running and (self._shutdown.state is not None or not self._now.failed):
            self._on_ranks_end()

    def _on_failed(self) -> None:
        """Handle the failure of a rank: replace it, or end the others."""
        if self._shutdown.state is not None or not self._ranks.replacing.take():
            self._shutdown.begin_for_failure()

    def _on_recovered(self, entry: dict[str, Any]) -> None:
        self.recoveries.append(entry)
        self._completed(entry)

    def _on_ranks_end(self) -> None:
        """Handle the end of all ranks: start them again, or finish, with a report if they have failed."""
        shutdown, generation = self._shutdown.state, self._now
        replacing = self._ranks.replacing
        self._ranks.spares.close()
        if shutdown is None:
            self._ranks.servers.conclude()
        self._ranks.servers.close()
        if shutdown is None:
            replacing.look()
        if shutdown is None and self._hosts is not None:
            self._hosts.on_success()
            return
        if shutdown is None or not shutdown.failed:
            self._server.end()
            return
        if self._hosts is not None and self._hosts.restarting.is_agreed:
            if self._hosts.restarting.is_cause:
                self.examine().write()
            self._hosts.restarting.ranks_ended()
        elif self._hosts is None or not self._hosts.awaits_cause(generation):
            self.conclude()

    def conclude(self) -> None:
        """Report the failure of ranks that have all ended, and start them again or finish."""
        shutdown, generation = self._shutdown.state, self._now
        assert shutdown is not None
        replacing = self._ranks.replacing
        verdict = generation.judge()
        if self._hosts is not None and self._hosts.takes_blame(verdict, ranks=self.job.ranks):
            self.examine().write()
            generation.close()
            return
        ending, decision = self.decide(verdict)
        postmortem = self.examine(
            remarks=[*filter(None, (replacing.reason, replacing.explain(verdict), decision.reason))]
        )
        postmortem.write()
        if self._hosts is not None:
            self._hosts.tell_failure(postmortem, verdict)
            if decision.restart:
                self._hosts.restarting.ranks_ended()
                return
        self._ending = ending
        generation.close()
        if decision.restart:
            self.restarts += 1
            ranks = f"all {self.job.ranks} ranks" if self.job.ranks > 1 else "it"
            used = f"restart {self.restarts} of {self.job.max_restarts}"
            if replacing.reason:
                self._relay.say(replacing.reason)
            self._relay.say(f"{postmortem.headline}; starting {ranks} again ({used})")
            self._shutdown.state = None
            self._server.sweep()
            self._start()
        else:
            self._shutdown.state = replace(shutdown, code=verdict.code)
            self.postmortem = postmortem
            self._server.end()

    def decide(self, verdict: RootCause | None) -> tuple[Ending, Decision]:
        """Return how the ranks have ended, and whether they are started again. None: a host is lost."""
        shutdown, ending = self._shutdown.state, Ending(code=1, account=None, met=True)
        if verdict is not None:
            cause = verdict.cause
            ending = Ending(code=cause.code, account=cause.account, met=self._now.observer.has_met())
        # A user who has asked the job to end does not want it to start again; torchrun's launcher takes no part.
        is_last = (shutdown is not None and shutdown.reason) or (
            self._hosts is not None and self._hosts.channel.has_torchrun
        )
        most = self.restarts if is_last else self.job.max_restarts
        return ending, decide_restart(ending, self._ending, restarts=self.restarts, max_restarts=most)

    def restart_on_hosts(self, what: str, ending: Ending, number: int) -> None:
        """Start the ranks of this host again, while the other hosts do the same.

        Args:
            what: What has failed, as words.
            ending: How it ended.
            number: The number of the latest decision on who the ranks are.
        """
        assert self._hosts is not None
        hosts = self._hosts.channel
        self._ending, self.restarts = ending, hosts.attempt
        place = hosts.place_to_restart()
        for local_rank, rank in enumerate(place.ranks):
            self._relay.move(rank, local_rank)
        self.job = self._asked = replace(self._asked, place=place, ranks=len(place.ranks) or self._asked.ranks)
        if self.changes is not None and (reason := self.changes.replacing.reason):
            self._relay.say(reason)
        used = f"restart {self.restarts} of {self.job.max_restarts}"
        self._relay.say(f"{what}; starting all {place.world_size} ranks again ({used})")
        if self.generation is None:
            self.start_when_met()  # this host's ranks had not been started
            return
        self.generation.close()
        self._shutdown.state = None
        self._server.sweep()
        self._start(number)

    def examine(self, remarks: Sequence[str] = ()) -> Postmortem:
        """Return the report on the ranks, of which one has failed, with remarks added."""
        return Postmortem(
            self.job,
            self._now,
            relay=self._relay,
            memory=self._memory,
            restarts=self.restarts,
            recoveries=self.recoveries,
            remarks=remarks,
        )
