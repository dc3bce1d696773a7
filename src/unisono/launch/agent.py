"""The process that owns a job: it starts the fork server, passes on the ranks' output, and ends the job as a whole.

One loop waits for everything: messages of the fork server, output of ranks, signals, questions of other commands, the
deadlines of a shutdown and of a hang. The agent does not import torch, so it starts at once. The state of one
generation of ranks is in `launch.generation`. Start reading at `_Agent.run`.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from unisono.launch.answers import describe_activity, describe_job, describe_stacks
from unisono.launch.channel import Channel, Message
from unisono.launch.cleanup import remove_scratch
from unisono.launch.control import Control
from unisono.launch.failure.postmortem import Postmortem, write_report
from unisono.launch.failure.root_cause import RootCause, name_signal
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.job_shutdown import JobShutdown
from unisono.launch.launch_job import LaunchJob
from unisono.launch.limits import check_open_files
from unisono.launch.linux import become_subreaper, descendants, end_descendants
from unisono.launch.output.relay import Relay
from unisono.launch.output.streams import wants_colour
from unisono.launch.rank_changes import RankChanges
from unisono.launch.restarts import Decision, Ending, decide_restart
from unisono.launch.shutdown import Shutdown
from unisono.launch.signals import describe_signal, signals_as_bytes
from unisono.memory import read_counters
from unisono.text import name_ranks

if TYPE_CHECKING:
    from unisono.launch.hosts.addresses import HostAddresses
    from unisono.launch.hosts.host_settings import HostPlace, HostSettings
    from unisono.launch.hosts.host_watch import HostWatch

__all__ = ["run_job"]

OnFailure = Callable[[int, int], bool]
OnRecovery = Callable[[dict[str, Any]], None]


def run_job(
    job: LaunchJob,
    *,
    environment: Mapping[str, str],
    stdout: TextIO,
    stderr: TextIO,
    on_failure: OnFailure = lambda rank, code: False,
    on_recovery: OnRecovery = lambda entry: None,
) -> int:
    """Run a job to its end and return the exit code of the launcher.

    The code is 0 if all ranks returned 0, otherwise that of the rank that was the cause; 128 + n if signal n ended that
    rank or the job. No process is left behind. Call it from the main thread: it handles signals while it runs.

    Args:
        on_failure: Called with the rank that was the cause of a failure and its exit code. Returns True if it reports
            the failure itself.
        on_recovery: Called when ranks have been replaced and all go on, with what `Replacing` tells about it.

    Raises:
        LaunchError: The system's limits do not allow this number of ranks, log files cannot be created, or no process
            can be started.
    """
    return _Agent(
        job, environment=environment, stdout=stdout, stderr=stderr, on_failure=on_failure, on_recovery=on_recovery
    ).run()


class _Agent:
    """One job from start to end."""

    def __init__(
        self,
        job: LaunchJob,
        *,
        environment: Mapping[str, str],
        stdout: TextIO,
        stderr: TextIO,
        on_failure: OnFailure,
        on_recovery: OnRecovery,
    ) -> None:
        self._job = self._asked = job = replace(job, run_id=job.run_id or secrets.token_hex(4))
        self._environment = environment
        self._on_failure, self._on_recovery = on_failure, on_recovery
        # Not epoll: it refuses regular files, and the launcher's streams may be such.
        self._selector = selectors.PollSelector()
        self._relay = Relay(
            self._selector,
            stdout=stdout,
            stderr=stderr,
            environment=environment,
            output=job.output,
            run_id=job.run_id,
            stdin=job.stdin,
        )
        self._colour = wants_colour(environment, terminal=stderr.isatty())
        self._started_s = time.time()
        self._memory = read_counters()
        self._port = 0
        self._scratch = ""
        self._restarts = 0
        self._generation: Generation | None = None
        self._changes: RankChanges | None = None
        self._recoveries: list[dict[str, Any]] = []
        self._ending: Ending | None = None
        self._postmortem: Postmortem | None = None
        self._hosts: HostWatch | None = None
        self._addresses: HostAddresses | None = None

    def run(self) -> int:
        """Run the job and return its exit code."""
        check_open_files(self._job.ranks, spares=self._job.spares, servers=self._job.servers)
        become_subreaper()
        with ExitStack() as stack:
            signals = stack.enter_context(signals_as_bytes(self._job.signals))
            # Other children of the caller do not belong to the job.
            stack.callback(self._clean_up, spare=descendants(os.getpid()))
            if self._job.metrics is not None:
                self._serve_metrics(*self._job.metrics, stack)
            if self._job.hosts is not None and (signum := self._find_hosts(self._job.hosts, signals)):
                self._relay.say(f"{describe_signal(signum)} while the endpoint of --rdzv-endpoint was looked up")
                return 128 + signum
            self._start_server(stack)
            stack.callback(Control(self._selector, self._answer).close)
            self._selector.register(self._server.channel, selectors.EVENT_READ, self._on_message)
            self._selector.register(signals, selectors.EVENT_READ, partial(self._on_signal, signals))
            if self._job.python and self._job.start_method == "fork":
                ranks = "1 rank" if self._job.ranks == 1 else f"{self._job.ranks} ranks"
                self._relay.notice(f"unisono: importing torch for {ranks} ...")
            while not self._server.channel.closed:
                self._turn()
        self._relay.finish()
        code = self._conclude()
        # The usual signal handlers are back, so an interrupt ends this even if a reader has stopped reading.
        self._relay.flush()
        return code

    def _serve_metrics(self, host: str, port: int, stack: ExitStack) -> None:
        from unisono.launch.metrics_server import MetricsServer  # noqa: PLC0415  few jobs need it

        def facts() -> dict[str, int]:
            running = self._shutdown.running if self._generation is not None else ()
            return {"ranks": self._job.ranks, "running": len(running), "recoveries": len(self._recoveries)}

        name = Path(self._job.target).name
        server = MetricsServer(self._selector, host=host, port=port, name=name, facts=facts)
        stack.callback(server.close)
        self._relay.listen(server.take)
        if port == 0:
            self._relay.say(f"metrics are at {server.address}")

    def _find_hosts(self, settings: HostSettings, signals: int) -> int:
        """Find the endpoint where hosts meet; return 0, or a signal that has come meanwhile."""
        # Not at the top: not needed on one machine.
        from unisono.launch.hosts.name_wait import await_addresses  # noqa: PLC0415

        self._addresses = await_addresses(
            settings,
            say=self._relay.say,
            notice=self._relay.notice,
            pause=lambda seconds: not select.select([signals], [], [], seconds)[0],
        )
        self._relay.notice("")
        return 0 if self._addresses is not None else os.read(signals, 1)[0]

    def _start_server(self, stack: ExitStack) -> None:
        """Start the fork server and, in a job on several hosts, what meets the others."""
        hosts = None
        if self._job.hosts is not None and self._addresses is not None:
            from unisono.launch.hosts.host_watch import HostWatch  # noqa: PLC0415  not needed on one machine
            from unisono.launch.hosts.job_hosts import JobHosts  # noqa: PLC0415

            hosts = JobHosts(self._job.hosts, self._addresses, ranks=self._job.ranks, role=self._job.role)
            stack.callback(hosts.close)
        self._server = ForkServerHandle(self._job, self._environment, hosts=hosts)
        stack.callback(self._server.close)  # after an error, too
        self._shutdown = JobShutdown(self._job, relay=self._relay, server=self._server)
        if hosts is not None:
            hosts.started()
            self._hosts = HostWatch(
                hosts,
                relay=self._relay,
                server=self._server,
                shutdown=self._shutdown,
                generation=lambda: self._generation,
                replacing=lambda: None if self._changes is None else self._changes.replacing,
                joined=self._on_joined,
                examine=self._examine,
                conclude=self._conclude_generation,
                decide=self._decide_restart,
                restart=self._restart_on_hosts,
            )
            self._selector.register(hosts.channel, selectors.EVENT_READ, partial(self._on_hosts, hosts.channel))

    def _clean_up(self, spare: Collection[int]) -> None:
        """End the processes that are left and remove their files: after a killed fork server, all of the job's."""
        end_descendants(spare=spare)
        remove_scratch(self._scratch)

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._timeout_s()):
            key.data()
        if self._relay.broken and self._shutdown.state is None:
            self._shutdown.begin_for_signal(signal.SIGPIPE, "standard output was closed")
        self._relay.tick()
        self._relay.balance()
        if (generation := self._generation) is not None:
            for text in generation.observer.tick():
                self._relay.show(text)
            if generation.observer.abort and self._shutdown.state is None:
                self._end_for_hang(generation.observer.abort)
            elif self._shutdown.state is None and (stuck := generation.observer.take_stuck()):
                self._relay.say(
                    f"{name_ranks(stuck)} kept the others waiting for {generation.observer.judge.stuck_s:g} s; killed "
                    "(--stuck-timeout)"
                )
                own = [rank for rank in stuck if rank in generation.ranks]  # others are on other hosts
                self._server.signal(signal.SIGKILL, own, group=True)
        if self._changes is not None and self._shutdown.state is None:
            if not self._changes.tick():
                self._on_failed()
                if not self._shutdown.running:
                    self._on_generation_end()
            if (size := len(self._now.ranks)) != self._job.ranks:  # also for a restart
                is_alone = size == 1 and self._hosts is None
                self._job = replace(self._asked, ranks=size, spares=0 if is_alone else self._asked.spares)
        if self._hosts is not None:
            self._hosts.tick()
        self._shutdown.advance()

    def _timeout_s(self) -> float | None:
        """Return how long the loop may sleep; None: until something happens."""
        deadlines = [self._relay.next_deadline_s(), None if self._hosts is None else self._hosts.deadline_s]
        if self._generation is not None:
            deadlines.append(self._generation.observer.next_deadline_s())
        if (shutdown := self._shutdown.state) is not None:
            deadlines.append(shutdown.next_s)
        elif self._changes is not None:
            deadlines.append(self._changes.next_deadline_s())
        soonest_s = min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=math.inf)
        return None if soonest_s == math.inf else max(0.0, soonest_s - time.monotonic())

    def _on_message(self) -> None:
        for message, _ in self._server.channel.receive():
            kind = message.pop("type")
            if "rank" in message and (rank := self._server.rank_of(message["rank"])) is not None:
                message["rank"] = rank
            elif "rank" in message and self._changes is not None:
                servers = self._changes.servers
                (servers if servers.has(message["rank"]) else self._changes.spares).on_message(kind, message)
                continue
            if kind == "ready":
                self._port, self._scratch, self._server.pid = message["port"], message["scratch"], message["pid"]
                self._relay.notice("")
                self._start_when_met()
            elif kind == "unstarted":
                self._on_unstarted(**message)
            elif kind == "store lost":
                code = self._server.wait()
                how = f"was killed by {name_signal(-code)}" if code < 0 else f"exited with code {code}"
                self._shutdown.begin_for_loss(f"the process of the job's store {how}")
            elif kind == "started":
                self._now.started(**message)
            elif kind == "failing":
                self._now.failing(**message)
                if self._now.failed:
                    self._on_failed()
            elif kind == "exited":
                self._on_exit(message)
            else:
                self._shutdown.begin_for_loss(message["message"])

    @property
    def _now(self) -> Generation:
        assert self._generation is not None, "a rank spoke before there was one"
        return self._generation

    @property
    def _ranks(self) -> RankChanges:
        assert self._changes is not None, "a rank spoke before there was one"
        return self._changes

    def _on_hosts(self, channel: Channel) -> None:
        assert self._hosts is not None
        if not self._hosts.on_message():
            self._selector.unregister(channel)

    def _on_joined(self, place: HostPlace) -> None:
        self._job = self._asked = replace(self._job, place=place, ranks=len(place.ranks) or self._job.ranks)
        self._restarts = 0 if self._hosts is None else self._hosts.channel.attempt
        self._start_when_met()

    def _start_when_met(self) -> None:
        """Start the ranks once there is a fork server and, if there are other hosts, their agents have come."""
        have_met = self._hosts is None or self._hosts.has_met
        if self._server.pid and have_met and self._generation is None and self._shutdown.state is None:
            self._start_ranks()

    def _start_ranks(self, number: int = 0) -> None:
        hosts = None if self._hosts is None else self._hosts.channel
        self._generation = generation = Generation(
            self._job, attempt=self._restarts, relay=self._relay, secret=None if hosts is None else hosts.secret
        )
        self._changes = RankChanges(
            self._job,
            generation,
            server=self._server,
            relay=self._relay,
            selector=self._selector,
            number=number if self._changes is None else max(number, self._changes.replacing.number),
            completed=self._on_recovered,
            lost=self._shutdown.begin_for_loss,
            port=self._port,
            visible_gpus=self._environment.get("CUDA_VISIBLE_DEVICES"),
            hosts=hosts,
        )
        self._shutdown.cover(generation, self._changes.spares)
        self._changes.start()

    def _on_recovered(self, entry: dict[str, Any]) -> None:
        self._recoveries.append(entry)
        self._on_recovery(entry)

    def _on_unstarted(self, rank: int, problem: str) -> None:
        """Handle a rank that could not be forked. No rank after it is forked."""
        self._now.running.discard(rank)
        if self._ranks.resizing.on_unstarted(rank, problem):
            return
        if self._ranks.replacing.is_new(rank):
            self._shutdown.begin_for_loss(f"rank {rank} could not be started in the place of one that died: {problem}")
        else:
            self._shutdown.begin_for_loss(
                f"rank {rank} could not be started, {self._now.local_rank(rank)} of {self._job.ranks} were: {problem}"
            )
        if not self._shutdown.running:
            self._on_generation_end()

    def _on_exit(self, message: Message) -> None:
        # Its output comes before messages about it.
        self._relay.drain({message["rank"]})
        if self._shutdown.state is not None or message["code"] != 0:
            self._relay.shut(message["rank"])
        self._now.ended(**message)
        self._ranks.on_exit(message["rank"], message["code"])
        lost = self._shutdown.state is None and self._ranks.replacing.left_without_joining(message["rank"])
        if message["rank"] in self._now.failed or lost:
            self._on_failed()
        # With state None and failures, other hosts have a say in what becomes of them.
        if not self._shutdown.running and (self._shutdown.state is not None or not self._now.failed):
            self._on_generation_end()

    def _on_failed(self) -> None:
        """Handle the failure of a rank: replace it, or end the others."""
        if self._shutdown.state is not None or not self._ranks.replacing.take():
            self._shutdown.begin_for_failure()

    def _on_generation_end(self) -> None:
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
                self._examine().write()
            self._hosts.restarting.ranks_ended()
        elif self._hosts is None or not self._hosts.awaits_cause(generation):
            self._conclude_generation()

    def _conclude_generation(self) -> None:
        """Report the failure of a generation whose ranks have ended, and start them again or finish."""
        shutdown, generation = self._shutdown.state, self._now
        assert shutdown is not None
        replacing = self._ranks.replacing
        verdict = generation.judge()
        if self._hosts is not None and self._hosts.takes_blame(verdict, ranks=self._job.ranks):
            self._examine().write()
            generation.close()
            return
        ending, decision = self._decide_restart(verdict)
        postmortem = self._examine(
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
            self._restarts += 1
            ranks = f"all {self._job.ranks} ranks" if self._job.ranks > 1 else "it"
            used = f"restart {self._restarts} of {self._job.max_restarts}"
            if replacing.reason:
                self._relay.say(replacing.reason)
            self._relay.say(f"{postmortem.headline}; starting {ranks} again ({used})")
            self._shutdown.state = None
            self._server.sweep()
            self._start_ranks()
        else:
            self._shutdown.state = replace(shutdown, code=verdict.code)
            self._postmortem = postmortem
            self._server.end()

    def _decide_restart(self, verdict: RootCause | None) -> tuple[Ending, Decision]:
        """Return how the ranks have ended, and whether they are started again. None: a host is lost."""
        shutdown, ending = self._shutdown.state, Ending(code=1, account=None, met=True)
        if verdict is not None:
            cause = verdict.cause
            ending = Ending(code=cause.code, account=cause.account, met=self._now.observer.has_met())
        # A user who has asked the job to end does not want it to start again; torchrun's launcher takes no part.
        is_last = (shutdown is not None and shutdown.reason) or (
            self._hosts is not None and self._hosts.channel.has_torchrun
        )
        most = self._restarts if is_last else self._job.max_restarts
        return ending, decide_restart(ending, self._ending, restarts=self._restarts, max_restarts=most)

    def _restart_on_hosts(self, what: str, ending: Ending, number: int) -> None:
        """Start the ranks of this host again, while the other hosts do the same."""
        assert self._hosts is not None
        hosts = self._hosts.channel
        self._ending, self._restarts = ending, hosts.attempt
        place = hosts.place_to_restart()
        for local_rank, rank in enumerate(place.ranks):
            self._relay.move(rank, local_rank)
        self._job = self._asked = replace(self._asked, place=place, ranks=len(place.ranks) or self._asked.ranks)
        if self._changes is not None and (reason := self._changes.replacing.reason):
            self._relay.say(reason)
        used = f"restart {self._restarts} of {self._job.max_restarts}"
        self._relay.say(f"{what}; starting all {place.world_size} ranks again ({used})")
        if self._generation is None:
            self._start_when_met()  # this host's ranks had not been started
            return
        self._generation.close()
        self._shutdown.state = None
        self._server.sweep()
        self._start_ranks(number)

    def _examine(self, remarks: Sequence[str] = ()) -> Postmortem:
        return Postmortem(
            self._job,
            self._now,
            relay=self._relay,
            memory=self._memory,
            restarts=self._restarts,
            recoveries=self._recoveries,
            remarks=remarks,
        )

    def _end_for_hang(self, hang: str) -> None:
        self._shutdown.begin(Shutdown(code=1), signal.SIGTERM, self._shutdown.running)
        report = {
            "run_id": self._job.run_id,
            "ranks": self._job.ranks,
            "headline": hang,
            "exit_code": 1,
            "hang": self._now.observer.report,
            "restarts": self._restarts,
            "max_restarts": self._job.max_restarts,
            "recoveries": self._recoveries,
        }
        write_report(report, relay=self._relay, attempt=self._now.attempt)
        self._relay.say(f"ending the job: ranks still wait, and --hang-abort is {self._now.observer.judge.abort_s:g} s")

    def _on_signal(self, signals: int) -> None:
        for signum in os.read(signals, 1):
            if self._shutdown.state is not None or self._generation is None:
                shutdown = self._shutdown.state or Shutdown(code=128 + signum)
                if self._hosts is not None and self._hosts.restarting.is_under_way:
                    shutdown = replace(shutdown, code=128 + signum)  # without the signal, there would be another start
                # After a failure too: then there is no restart.
                self._shutdown.state = replace(shutdown, reason=shutdown.reason or describe_signal(signum))
                self._shutdown.kill()
            else:
                self._shutdown.begin_for_signal(signum, describe_signal(signum))

    def _answer(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply to `unisono ps`, `top`, `stacks` or `drill`, None to an unknown question."""
        job, kind = self._job, question.get("ask")
        if kind in ("job", "top"):
            facts: dict[str, Any] = {
                "restarts": self._restarts,
                "recoveries": len(self._recoveries),
                "world_size": job.world_size if self._generation is None else self._generation.size,
                "started_s": self._started_s,
            }
            spares = 0 if self._changes is None else self._changes.spares.ready
            generation = self._generation
            running = set() if generation is None else {generation.local_rank(rank) for rank in generation.running}
            activity = {"activity": describe_activity(generation)} if kind == "top" else {}
            servers = [] if self._changes is None else self._changes.servers.running
            facts = {**facts, "spares": spares, "servers": servers, **self._relay.progress, **activity}
            return describe_job(job, running=running, facts=facts)
        if kind == "scale" and type(ranks := question.get("ranks")) is int:
            is_over = self._shutdown.state is not None or self._changes is None
            problem = "it is about to end" if is_over else self._ranks.resizing.request(ranks)
            return {"problem": problem, "ranks": self._now.size if self._generation is not None else job.ranks}
        if kind == "scaling":
            return self._changes.resizing.status if self._changes is not None else None
        if kind == "stacks":
            return describe_stacks(self._generation, full=bool(question.get("full")))
        if kind == "ranks":
            return {"ranks": self._generation.describe_ranks() if self._generation is not None else []}
        return None

    def _conclude(self) -> int:
        """Report how the job ended, if that is not reported yet, and return the exit code."""
        shutdown, server = self._shutdown.state, self._server.wait()
        if (postmortem := self._postmortem) is not None and not self._on_failure(*postmortem.blamed):
            self._relay.show(postmortem.text(colour=self._colour))
        if shutdown is not None:
            if shutdown.reason:
                count = f"; {shutdown.ranks} rank{'s' * (shutdown.ranks > 1)} ended" if shutdown.ranks else ""
                self._relay.say(f"{shutdown.reason}{count}")
            return shutdown.code
        if server < 0:
            self._relay.say(f"the fork server was killed by {name_signal(-server)}, and the job with it")
        elif server > 0:
            self._relay.say("the process that imports torch for all ranks failed; its message is above")
        return 1 if server else 0
