"""The process that owns a job: it starts the fork server, passes on what ranks print, and ends the job as a whole.

One loop waits for everything: messages of the fork server, output of ranks, signals, the deadline of a shutdown. The
agent does not import torch, so it is there at once. Start reading at `Agent.run`.
"""

from __future__ import annotations

import os
import resource
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TextIO

from unisono.errors import LaunchError
from unisono.launch.channel import Channel, Message
from unisono.launch.environment import job_environment, rank_environment
from unisono.launch.failure import Failure, exit_status, first_failure, name_ranks, name_signal
from unisono.launch.job import Job
from unisono.launch.linux import become_subreaper, descendants, end_descendants
from unisono.launch.relay import Relay
from unisono.machine import usable_cores

__all__ = ["run_job"]

# The folder that `-c` puts in front of the search path would let a file of the user's hide a module that torch needs.
_SERVER = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "from unisono.launch.forkserver import main; main()"
)

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_job(job: Job, *, environment: Mapping[str, str], stdout: TextIO, stderr: TextIO) -> int:
    """Run a job to its end and return the exit code of the launcher.

    That is 0 if all ranks returned 0, else the code of the rank that failed first; 128 + n where signal n ended that
    rank, or this process. Leaves no process behind. Call it from the main thread: it handles signals while it runs.
    Raises: LaunchError if the system's limits do not allow so many ranks.
    """
    return _Agent(job, environment=environment, stdout=stdout, stderr=stderr).run()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stop:
    """Why and how a job is being ended early."""

    code: int
    """The exit code that follows from the reason."""
    verdict: str = ""
    """What is said at the end, when the number of ranks is known."""
    ranks: int = 0
    """How many ranks were running."""
    deadline_s: float = 0.0
    """When ranks that are still there are killed, by the monotonic clock."""
    killed: bool = False
    """Whether that has happened."""


class _Agent:
    """One job from start to end."""

    def __init__(self, job: Job, *, environment: Mapping[str, str], stdout: TextIO, stderr: TextIO) -> None:
        self._job = job
        self._environment = environment
        # Not epoll: it refuses regular files, which a stream of ours may be.
        self._selector = selectors.PollSelector()
        self._relay = Relay(self._selector, stdout=stdout, stderr=stderr, environment=environment)
        self._running: set[int] = set()
        self._failures: dict[int, Failure] = {}
        self._ready = False
        self._stop: _Stop | None = None

    def run(self) -> int:
        """Run the job and return its exit code."""
        _check_limits(self._job)
        become_subreaper()
        with ExitStack() as stack:
            signals = stack.enter_context(_signals_as_bytes())
            # A caller's other children are none of ours.
            stack.callback(end_descendants, spare=descendants(os.getpid()))
            self._server, self._channel = self._start_server()
            stack.callback(self._server.wait)
            stack.callback(self._channel.close)  # ends the server, whatever brought us here
            self._selector.register(self._channel, selectors.EVENT_READ, self._on_message)
            self._selector.register(signals, selectors.EVENT_READ, partial(self._on_signal, signals))
            while not self._channel.closed:
                self._turn()
        self._relay.finish()
        code = self._conclude()
        # The usual handlers are back, so a reader that takes no more cannot keep an interrupt from us.
        self._relay.flush()
        return code

    def _start_server(self) -> tuple[subprocess.Popen[bytes], Channel]:
        ours, theirs = socket.socketpair()
        job = self._job
        with theirs:
            server = subprocess.Popen(
                [sys.executable, "-c", _SERVER, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                env=job_environment(self._environment, ranks=job.ranks, cores=usable_cores()),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        channel = Channel(ours)
        program = {"target": job.target, "module": job.module, "arguments": job.arguments}
        channel.send({"type": "start", **program, "preload": job.preload})
        return server, channel

    def _turn(self) -> None:
        stop = self._stop
        timeout_s = None if stop is None or stop.killed else max(0.0, stop.deadline_s - time.monotonic())
        for key, _ in self._selector.select(timeout_s):
            key.data()
        if self._relay.broken and self._stop is None:
            self._end_for_signal(signal.SIGPIPE, "standard output was closed")
        self._relay.balance()
        if (stop := self._stop) and not stop.killed and time.monotonic() >= stop.deadline_s:
            if self._running:
                names, grace = name_ranks(self._running), f"{self._job.shutdown_timeout_s:g} s"
                self._relay.say(f"{names} did not end within {grace}; killed")
            self._kill()

    def _on_message(self) -> None:
        for message, _ in self._channel.receive():
            kind = message.pop("type")
            if kind == "ready":
                self._start_ranks(message["port"])
            elif kind == "failing":
                self._failures[message["rank"]] = Failure(**message, reported=True)
            elif kind == "exited":
                self._on_exit(message)
            else:
                self._end_for_loss(message["message"])

    def _start_ranks(self, port: int) -> None:
        self._ready = True
        run_id = secrets.token_hex(8)
        for rank in range(self._job.ranks):
            environment = rank_environment(rank, ranks=self._job.ranks, port=port, run_id=run_id)
            files = self._relay.open(rank)
            self._channel.send({"type": "fork", "rank": rank, "environment": environment}, files)
            for file in files:
                os.close(file)
            self._running.add(rank)

    def _on_exit(self, message: Message) -> None:
        rank, code = message["rank"], message["code"]
        self._running.discard(rank)
        # What it printed belongs before what is said about it.
        self._relay.drain({rank})
        if code != 0 and self._stop is None:
            told = self._failures.get(rank)
            self._failures[rank] = replace(told, code=code) if told else Failure(**message, reported=False)
            self._end_for_failure(first_failure(self._failures.values()))
        if not self._running:
            self._channel.send({"type": "end"})

    def _end_for_failure(self, cause: Failure) -> None:
        others = self._running - {cause.rank}  # the cause may still be on its way out, with its own exit code
        self._begin_stop(_Stop(code=exit_status(cause.code)), signal.SIGTERM, others)
        if len(others) == self._job.ranks - 1:
            ending = f"the other {len(others)} ranks" if len(others) > 1 else "the other rank"
        else:
            ending = f"{name_ranks(others)}, still running" if others else ""
        self._relay.say(cause.describe() + (f"; ending {ending}" if others else ""))

    def _end_for_loss(self, loss: str) -> None:
        if self._stop is None:
            self._begin_stop(_Stop(code=1), signal.SIGTERM, self._running)
            self._relay.say(f"{loss}; ending the job")

    def _on_signal(self, signals: int) -> None:
        for signum in os.read(signals, 1):
            if self._stop is not None or not self._ready:
                self._stop = self._stop or _Stop(code=128 + signum, verdict=_verdict(signum))
                self._kill()
            else:
                self._end_for_signal(signum, _verdict(signum))

    def _end_for_signal(self, signum: int, verdict: str) -> None:
        stop = _Stop(code=128 + signum, verdict=verdict, ranks=len(self._running))
        if signum == signal.SIGINT:
            # Only the ranks, not what they started: worker processes would answer with tracebacks of their own.
            self._begin_stop(stop, signum, self._running, group=False)
        else:
            self._begin_stop(stop, signal.SIGTERM, self._running)

    def _begin_stop(self, stop: _Stop, signum: int, ranks: set[int], *, group: bool = True) -> None:
        self._stop = replace(stop, deadline_s=time.monotonic() + self._job.shutdown_timeout_s)
        self._channel.send({"type": "signal", "signal": signum, "ranks": sorted(ranks), "group": group})

    def _kill(self) -> None:
        assert self._stop is not None
        self._stop = replace(self._stop, killed=True)
        if self._ready:
            ranks = sorted(self._running)
            self._channel.send({"type": "signal", "signal": signal.SIGKILL, "ranks": ranks, "group": True})
        else:
            self._server.kill()

    def _conclude(self) -> int:
        """Say how the job ended, if that is not said yet. Returns: the exit code."""
        stop, server = self._stop, self._server.returncode
        if stop is not None:
            if stop.verdict:
                count = f"; {stop.ranks} rank{'s' * (stop.ranks > 1)} ended" if stop.ranks else ""
                self._relay.say(f"{stop.verdict}{count}")
            return stop.code
        if server < 0:
            self._relay.say(f"the fork server was killed by {name_signal(-server)}, and the job with it")
        elif server > 0:
            self._relay.say("the process that imports torch for all ranks failed; its message is above")
        return 1 if server else 0


@contextmanager
def _signals_as_bytes() -> Iterator[int]:
    """Turn signals into bytes of a pipe for the loop. One that was ignored at the start, as under nohup, stays so."""
    read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    earlier_file = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    handled = [signum for signum in _HANDLED if signal.getsignal(signum) is not signal.SIG_IGN]
    earlier = {signum: signal.signal(signum, lambda *_: None) for signum in handled}
    try:
        yield read
    finally:
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(earlier_file)
        os.close(read)
        os.close(write)


def _check_limits(job: Job) -> None:
    needed = 2 * job.ranks + 32  # two pipes per rank, and what the interpreter and the agent have open
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise LaunchError(
            f"{job.ranks} ranks need {needed} open files, and the limit is {limit}; "
            f"raise it with `ulimit -n {needed}`, or start at most {max(1, (limit - 32) // 2)} ranks"
        )


def _verdict(signum: int) -> str:
    return "interrupted" if signum == signal.SIGINT else f"{name_signal(signum)} received"
