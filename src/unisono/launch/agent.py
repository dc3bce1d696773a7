"""The process that owns a job: it starts the fork server, passes on the ranks' output, and ends the job as a whole.

One loop waits for everything: messages of the fork server, output of ranks, signals, questions of other commands, the
deadlines of a shutdown and of a hang. The agent does not import torch, so it starts at once. What becomes of the ranks
is in `launch.attempts`. Start reading at `_Agent.run`.
"""

from __future__ import annotations

import math
import os
import secrets
import select
import selectors
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from unisono.launch.answers import describe_activity, describe_job, describe_stacks
from unisono.launch.attempts import Attempts
from unisono.launch.channel import Channel
from unisono.launch.cleanup import remove_scratch
from unisono.launch.control import Control
from unisono.launch.failure.root_cause import name_signal
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.job_shutdown import JobShutdown
from unisono.launch.launch_job import LaunchJob
from unisono.launch.limits import check_open_files
from unisono.launch.linux import become_subreaper, descendants, end_descendants
from unisono.launch.output.relay import Relay
from unisono.launch.output.streams import wants_colour
from unisono.launch.signals import describe_signal, signals_as_bytes
from unisono.memory import read_counters

if TYPE_CHECKING:
    from unisono.launch.hosts.addresses import HostAddresses
    from unisono.launch.hosts.host_settings import HostSettings
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
        self._job = job = replace(job, run_id=job.run_id or secrets.token_hex(4))
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
            role=job.role,
            stdin=job.stdin,
        )
        self._colour = wants_colour(environment, terminal=stderr.isatty())
        self._started_s = time.time()
        self._memory = read_counters()
        self._scratch = ""
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
            attempts, running = self._attempts, self._shutdown.running
            return {"ranks": attempts.job.ranks, "running": len(running), "recoveries": len(attempts.recoveries)}

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

            hosts = JobHosts(
                self._job.hosts,
                self._addresses,
                ranks=self._job.ranks,
                role=self._job.role,
                flags=self._job.flags_of_all,
            )
            stack.callback(hosts.close)
        self._server = ForkServerHandle(self._job, self._environment, hosts=hosts)
        stack.callback(self._server.close)  # after an error, too
        self._shutdown = JobShutdown(self._job, relay=self._relay, server=self._server)
        self._attempts = attempts = Attempts(
            self._job,
            server=self._server,
            shutdown=self._shutdown,
            relay=self._relay,
            selector=self._selector,
            memory=self._memory,
            visible_gpus=self._environment.get("CUDA_VISIBLE_DEVICES"),
            completed=self._on_recovery,
        )
        if hosts is not None:
            hosts.started()
            self._hosts = HostWatch(
                hosts,
                relay=self._relay,
                server=self._server,
                shutdown=self._shutdown,
                generation=lambda: attempts.generation,
                replacing=lambda: None if attempts.changes is None else attempts.changes.replacing,
                joined=attempts.place,
                examine=attempts.examine,
                conclude=attempts.conclude,
                decide=attempts.decide,
                restart=attempts.restart_on_hosts,
            )
            attempts.join(self._hosts)
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
        self._attempts.tick()
        if self._hosts is not None:
            self._hosts.tick()
        self._shutdown.advance()

    def _timeout_s(self) -> float | None:
        """Return how long the loop may sleep; None: until something happens."""
        deadlines = [
            self._relay.next_deadline_s(),
            self._attempts.next_deadline_s(),
            None if self._hosts is None else self._hosts.deadline_s,
            None if self._shutdown.state is None else self._shutdown.state.next_s,
        ]
        soonest_s = min((deadline_s for deadline_s in deadlines if deadline_s is not None), default=math.inf)
        return None if soonest_s == math.inf else max(0.0, soonest_s - time.monotonic())

    def _on_message(self) -> None:
        for message, _ in self._server.channel.receive():
            kind = message.pop("type")
            if "rank" in message and (rank := self._server.rank_of(message["rank"])) is not None:
                message["rank"] = rank
            elif "rank" in message and (changes := self._attempts.changes) is not None:
                servers = changes.servers
                (servers if servers.has(message["rank"]) else changes.spares).on_message(kind, message)
                continue
            if kind == "ready":
                self._server.pid, self._server.port, self._scratch = message["pid"], message["port"], message["scratch"]
                self._relay.notice("")
                self._attempts.start_when_met()
            elif kind == "unstarted":
                self._attempts.on_unstarted(**message)
            elif kind == "store lost":
                code = self._server.wait()
                how = f"was killed by {name_signal(-code)}" if code < 0 else f"exited with code {code}"
                self._shutdown.begin_for_loss(f"the process of the job's store {how}")
            elif kind == "started":
                self._attempts.on_started(**message)
            elif kind == "failing":
                self._attempts.on_failing(**message)
            elif kind == "exited":
                self._attempts.on_exit(**message)
            else:
                self._shutdown.begin_for_loss(message["message"])

    def _on_hosts(self, channel: Channel) -> None:
        assert self._hosts is not None
        if not self._hosts.on_message():
            self._selector.unregister(channel)

    def _on_signal(self, signals: int) -> None:
        for signum in os.read(signals, 1):
            if (shutdown := self._shutdown.state) is not None:
                if self._hosts is not None and self._hosts.restarting.is_under_way:
                    shutdown = replace(shutdown, code=128 + signum)  # without the signal, there would be another start
                # After a failure too: then there is no restart.
                self._shutdown.state = replace(shutdown, reason=shutdown.reason or describe_signal(signum))
                self._shutdown.kill()
            else:
                self._shutdown.begin_for_signal(signum, describe_signal(signum))

    def _answer(self, question: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply to `unisono ps`, `top`, `stacks` or `drill`, None to an unknown question."""
        attempts, kind = self._attempts, question.get("ask")
        job, generation, changes = attempts.job, attempts.generation, attempts.changes
        if kind in ("job", "top"):
            facts: dict[str, Any] = {
                "restarts": attempts.restarts,
                "recoveries": len(attempts.recoveries),
                "world_size": job.world_size if generation is None else generation.size,
                "started_s": self._started_s,
            }
            spares = 0 if changes is None else changes.spares.ready
            running = set() if generation is None else {generation.local_rank(rank) for rank in generation.running}
            servers = [] if changes is None else changes.servers.running
            facts = {**facts, "spares": spares, "servers": servers, **self._relay.progress}
            facts |= self._describe_activity() if kind == "top" else {}
            return describe_job(job, running=running, facts=facts)
        if kind == "scale" and type(ranks := question.get("ranks")) is int:
            is_over = self._shutdown.state is not None
            problem = "it is about to end" if changes is None or is_over else changes.resizing.request(ranks)
            return {"problem": problem, "ranks": generation.size if generation is not None else job.ranks}
        if kind == "scaling":
            return changes.resizing.status if changes is not None else None
        if kind == "stacks":
            return self._answer_stacks(str(question.get("question", "")), full=bool(question.get("full")))
        if kind == "ranks":
            return {"ranks": generation.describe_ranks() if generation is not None else []}
        return None

    def _describe_activity(self) -> dict[str, Any]:
        if self._hosts is not None and self._hosts.channel.reaches_all:
            return self._hosts.activity.describe()
        return {"activity": describe_activity(self._attempts.generation)}

    def _answer_stacks(self, question: str, *, full: bool) -> dict[str, Any]:
        if self._hosts is not None and self._hosts.channel.reaches_all:
            return self._hosts.stacks.reply(question, full=full)
        return describe_stacks(self._attempts.generation, full=full)

    def _conclude(self) -> int:
        """Report how the job ended, if that is not reported yet, and return the exit code."""
        shutdown, server = self._shutdown.state, self._server.wait()
        if (postmortem := self._attempts.postmortem) is not None and not self._on_failure(*postmortem.blamed):
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
