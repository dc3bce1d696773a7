"""The fork server of a job as the agent sees it: its start, the requests to it, and its end.

There are two processes. The one that is started here hosts the job's store (`launch.store_process`) and forks the
fork server, which it outlives. Messages come from the fork server; `launch.forkserver` lists them. They name processes
by number: that of a rank, unless the process was a spare one.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from unisono.errors import LaunchError
from unisono.launch.channel import Channel
from unisono.launch.environment import job_environment
from unisono.launch.launch_job import LaunchJob
from unisono.launch.limits import describe_failed_fork
from unisono.launch.source_scan import modules_to_preload, program_source, uses_trainer
from unisono.machine import usable_cores

__all__ = ["LAST_S", "ForkServerHandle"]

LAST_S = 10.0
"""How long the fork server may take, after ranks have been killed, to say that they have ended, and then to end."""


class Hosts(Protocol):
    """The facts that the store's host needs to meet other hosts (`launch.hosts.job_hosts`)."""

    @property
    def interface(self) -> str:
        """The network interface over which ranks reach each other; "" if it is not known."""

    @property
    def facts(self) -> dict[str, Any]:
        """Settings, addresses, number of ranks and role."""

    @property
    def link(self) -> int:
        """The file over which the agent is told about hosts."""


_FIRST_SPARE = 1 << 20
"""Numbers of spare processes are above this one, those of ranks below."""

# The folder that `-c` puts in front of the search path would let a user's file hide a module that torch needs.
_SERVER = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "from unisono.launch.forkserver import main; main()"
)


class ForkServerHandle:
    """A fork server that has been started, and the process that hosts the store.

    Args:
        job: The job that ranks run.
        environment: The caller's environment variables.
        hosts: On several hosts, what the store's host needs to meet the others.

    Raises:
        LaunchError: No process could be started.
    """

    def __init__(self, job: LaunchJob, environment: Mapping[str, str], *, hosts: Hosts | None = None) -> None:
        self.pid = 0
        """The process id of the fork server; 0 until it is known."""
        self.port = 0
        """The port of the job's store; 0 until it is known."""
        ours, theirs = socket.socketpair()
        source = program_source(job)
        with theirs:
            try:
                self._store_host = subprocess.Popen(
                    [sys.executable, "-c", _SERVER, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    env=job_environment(
                        environment,
                        ranks=job.ranks,
                        cores=usable_cores(),
                        huge_pages=uses_trainer(source),
                        interface="lo" if hosts is None else hosts.interface,
                    ),
                    pass_fds=[theirs.fileno(), *job.files],
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise LaunchError(f"no process could be started: {describe_failed_fork(error)}") from error
        self.channel = Channel(ours)
        self._numbers: dict[int, int] = {}  # by rank, where the number of its process is another one
        self._spares = 0
        program = {
            "target": job.target,
            "module": job.module,
            "python": job.python,
            "forked": job.python and job.start_method == "fork",
            "arguments": job.arguments,
            "pass_local_rank": job.pass_local_rank,
            "numa_binding": job.numa_binding,
            "cpu_backend": job.cpu_backend,
            "recover": job.recover,
        }
        preload = modules_to_preload(job, source)
        message = {"type": "start", "program": program, "preload": preload, "port": job.master_port}
        if hosts is None:
            self.channel.send(message)
        else:
            self.channel.send({**message, "hosts": hosts.facts}, [hosts.link])

    def fork(self, rank: int, *, environment: Mapping[str, str], files: Mapping[str, int]) -> None:
        """Request the start of a rank, and close its files in this process."""
        self._numbers.pop(rank, None)
        self._fork(rank, environment, files)

    def fork_spare(self, *, environment: Mapping[str, str], files: Mapping[str, int]) -> int:
        """Request the start of a process without a rank, and close its files here; return its number."""
        self._spares += 1
        number = _FIRST_SPARE + self._spares
        self._fork(number, environment, files)
        return number

    def assign(self, number: int, rank: int) -> None:
        """Let a spare process stand for a rank from now on."""
        self._numbers[rank] = number

    def rank_of(self, number: int) -> int | None:
        """Return the rank of a process by its number; None for a spare one."""
        if number < _FIRST_SPARE:
            return number
        return next((rank for rank, each in self._numbers.items() if each == number), None)

    def end_spare(self, number: int) -> None:
        """Kill a spare process and what it has started."""
        self._send("signal", signal=signal.SIGKILL, ranks=[number], group=True)

    def signal(self, signum: int, ranks: Iterable[int], *, group: bool) -> None:
        """Send a signal to ranks.

        Args:
            group: True to send it to the processes that they have started, too.
        """
        numbers = sorted(self._numbers.get(rank, rank) for rank in ranks)
        self._send("signal", signal=signum, ranks=numbers, group=group)

    def clear(self, group: int) -> None:
        """Request the end of the processes that the rank with this process group has left behind."""
        self._send("clear", group=group)

    def sweep(self) -> None:
        """Request the end of the processes, and the removal of the files, that an attempt has left behind."""
        self._send("sweep")

    def end(self) -> None:
        """Ask the fork server to end."""
        self._send("end")

    def resume(self) -> None:
        """Continue both processes, since a stopped one would read no message."""
        for pid in (self._store_host.pid, self.pid):
            if pid:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def wait(self) -> int:
        """Return the exit code of the store's host once it has ended."""
        return self._store_host.wait()

    def kill(self) -> None:
        """Kill the fork server; the store's host ends the rest. Before there is a fork server, kill the host."""
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        else:
            self._store_host.kill()

    def close(self) -> None:
        """End both processes, and kill the store's host if it does not end."""
        self.channel.close()
        self._store_host.send_signal(signal.SIGCONT)
        try:
            self._store_host.wait(LAST_S)
        except subprocess.TimeoutExpired:
            self._store_host.kill()
            self._store_host.wait()

    def _fork(self, number: int, environment: Mapping[str, str], files: Mapping[str, int]) -> None:
        message = {"type": "fork", "rank": number, "environment": environment, "names": [*files]}
        self.channel.send(message, [*files.values()])
        for file in files.values():
            os.close(file)

    def _send(self, kind: str, **fields: Any) -> None:
        self.channel.send({"type": kind, **fields})
