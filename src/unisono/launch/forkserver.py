"""The process that imports torch once and forks the ranks, in milliseconds each.

The agent starts it and talks to it over a channel. It runs no operation of torch, starts no thread and touches no GPU:
a fork copies only the calling thread, and CUDA does not survive one. It is the parent of the ranks, so it sees
them end; it is the subreaper of all processes they start, so it can leave none behind, even if the agent is killed.

The process that the agent starts imports torch and forks once: the child is the fork server, the parent hosts the job's
store and is the subreaper above the server (`launch.store_process`). So even if both agent and server are killed, no
process is left.

Under `--start-method spawn`, and for programs that are not Python, it imports nothing: its forks execute a new
interpreter, or the program.

From the agent: `start` (the program), `fork` (rank, environment; files by name), `signal` (ranks, signal, group),
`clear` (end what the rank with this process group has left), `sweep` (end what all ended ranks have left) and `end`. To
the agent: `ready` (port, scratch, pid), `started` (rank, pid), `unstarted` (rank, problem), `failing` and `exited`
(rank, code, time_ns), `lost` (message), `store lost`. A spare process has a number in the place of a rank, which it
keeps when it becomes one: `launch.forkserver_handle` knows which rank a number stands for. Servers of embedding tables
have such numbers, too. Start reading at `main`.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from unisono.launch.channel import Channel, Message
from unisono.launch.cleanup import Leftovers, make_scratch, remove_scratch
from unisono.launch.fast_exit import Preloaded, prepare
from unisono.launch.limits import describe_failed_fork
from unisono.launch.linux import become_subreaper, descendants, end_descendants, ends_at_once, set_parent_death_signal
from unisono.launch.rank_process import Program, RankFiles, RankProcess, execute, run_program, settle
from unisono.launch.reserved_files import move_out_of_the_way
from unisono.launch.source_scan import DYNAMO, TRAINER
from unisono.launch.store_process import JoinedHosts, host_store
from unisono.variables import EVENTS_VARIABLE, SERVER_PAGE_VARIABLE, SERVER_VARIABLE

__all__ = ["main"]

_HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a batch system or a container sends to every process. The agent decides what they mean."""

_MOST_ROUNDS = 3
"""How often the processes that a rank has left are looked for: one may be about to start another."""


def main() -> None:
    """Serve the agent; in a forked process, become a rank and run the user's program. Called by the interpreter."""
    file, agent = map(int, sys.argv[1:])
    set_parent_death_signal(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    channel = Channel(socket.socket(fileno=file))
    os.set_inheritable(file, False)
    server = _ForkServer(channel)
    process = server.serve()
    # Only a rank gets here. Its call stack holds nothing of the server.
    del server, channel
    run_program(process)


class _ForkServer:
    """The loop of the fork server and its state, all of which a rank gives up."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._ranks: dict[int, int] = {}  # by process id
        self._leftovers = Leftovers()
        self._preloaded = Preloaded()
        self._guardian = -1
        self._scratch = ""
        self._refused = ""
        self._reports, self._report = os.pipe2(os.O_CLOEXEC)
        self._wakeups, self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._reports, False)
        self._dispositions = {signum: signal.signal(signum, signal.SIG_IGN) for signum in _HELD_BACK}

    def serve(self) -> RankProcess:
        """Answer the agent until it is done or gone, then end this process. Returns in forked ranks only."""
        self._start()
        poll = select.poll()
        for file in (self._channel.fileno(), self._reports, self._wakeups, self._guardian):
            poll.register(file, select.POLLIN)
        while True:
            ready = {file for file, _ in poll.poll()}
            # Reports of ranks are read before their exits: an error comes before the exit it led to.
            if self._reports in ready:
                self._read_reports()
            if self._wakeups in ready:
                os.read(self._wakeups, 1024)
                self._report_ended_ranks()
            if self._guardian in ready:
                poll.unregister(self._guardian)
                self._channel.send({"type": "store lost"})
            if self._channel.fileno() in ready:
                for message, files in self._channel.receive():
                    process = self._obey(message, files)
                    if process is not None:
                        return process
            if self._channel.closed:
                self._end()

    def _start(self) -> None:
        while not (received := self._channel.receive()):
            if self._channel.closed:
                os._exit(1)
        message, links = received[0]
        self._program = Program(**message["program"])
        if self._program.forked:
            gc.disable()  # objects that torch creates on import stay, and collecting takes a sixth of the time
            libraries = [name for name in message["preload"] if name in (DYNAMO, TRAINER)]
            for name in ("torch", "torch.distributed", *libraries):
                import_module(name)
            gc.enable()
            for name in message["preload"]:
                import_module(name)
            self._preloaded = prepare(programs=len(message["preload"]) > len(libraries))
        # Every rank shares these objects. Hidden from the collector, they are neither visited nor copied by ranks.
        gc.collect()
        gc.freeze()
        # From now on the closed channel shows that the agent is gone, and there is something to clean up.
        set_parent_death_signal(0)
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that an earlier job has just left
            listener.bind(("127.0.0.1", message["port"]))
        except OSError as error:
            problem = f"port {message['port']} of 127.0.0.1 cannot be used: {error.strerror}"
            self._channel.send({"type": "lost", "message": problem})
            self._end()
        listener.listen(socket.SOMAXCONN)
        self._scratch = make_scratch() if self._program.python else ""
        self._leave_store(listener, {**message["hosts"], "link": links[0]} if links else None)
        become_subreaper()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        ready = {"port": listener.getsockname()[1], "scratch": self._scratch, "pid": os.getpid()}
        self._channel.send({"type": "ready", **ready})
        listener.close()

    def _leave_store(self, listener: socket.socket, hosts: dict[str, Any] | None) -> None:
        """Continue in a child of this process, which hosts the job's store from now on.

        The store is in another process because it runs threads and the server must have none. It listens on a socket
        bound beforehand: no other process can take the port, and none outside this machine can reach it. On several
        hosts, that process also meets the others.
        """
        self._guardian, alive = os.pipe2(os.O_CLOEXEC)  # it is closed when the guardian ends, for whatever reason
        try:
            server = os.fork()
        except OSError as error:
            problem = f"the job's fork server could not be started: {describe_failed_fork(error)}"
            self._channel.send({"type": "lost", "message": problem})
            self._end()
        if server:
            for file in (self._guardian, self._reports, self._report, self._wakeups, self._wakeup):
                os.close(file)
            join = None if hosts is None else (hosts["link"], partial(_join_hosts, hosts))
            host_store(server, agent=self._channel, listener=listener, scratch=self._scratch, join=join)
        os.close(alive)
        if hosts is not None:
            os.close(hosts["link"])

    def _obey(self, message: Message, files: list[int]) -> RankProcess | None:
        kind = message["type"]
        if kind == "fork":
            return self._fork_rank(
                message["rank"], message["environment"], RankFiles(**dict(zip(message["names"], files, strict=True)))
            )
        if kind == "signal":
            self._signal(message["signal"], set(message["ranks"]), group=message["group"])
            return None
        if kind == "clear":
            self._refused = ""
            self._clear(message["group"])
            return None
        if kind == "sweep":
            self._refused = ""
            end_descendants(leftovers=self._leftovers)
            self._ranks.clear()  # spare processes may have run until now, and nobody waits for their ends
            return None
        if kind == "end":
            self._end()
        raise AssertionError(f"the agent sent {message}")

    def _signal(self, signum: int, ranks: set[int], *, group: bool) -> None:
        if signum != signal.SIGCONT:
            self._leftovers.look(descendants(os.getpid()))
        for pid, rank in self._ranks.items():  # none of them is reaped, so no number has a new owner
            if rank in ranks:
                # The workers of a rank that ends at once would complain about its loss, so they end with it.
                asked = signum not in (signal.SIGKILL, signal.SIGCONT)
                with suppress(ProcessLookupError, PermissionError):
                    (os.killpg if group or (asked and ends_at_once(pid, signum)) else os.kill)(pid, signum)

    def _clear(self, group: int) -> None:
        """Kill what a rank that has ended has left in its process group, such as data workers."""
        # The processes are looked up one by one: the number of a group without processes may have a new owner.
        killed: set[int] = set()
        for _ in range(_MOST_ROUNDS):
            left = [pid for pid in descendants(os.getpid()) if pid not in self._ranks and _group_of(pid) == group]
            # Helpers that remove files end by themselves when the processes that use them have ended.
            doomed = {pid for pid in left if self._leftovers.note(pid) == 0} - killed
            if not doomed or group in self._ranks:
                return
            killed |= doomed
            for pid in doomed:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)

    def _fork_rank(self, rank: int, environment: dict[str, str], files: RankFiles) -> RankProcess | None:
        # A signal for the rank waits until it has its own handlers.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        server = os.getpid()
        try:
            pid = -1 if self._refused else os.fork()
        except OSError as error:
            pid, self._refused = -1, describe_failed_fork(error)
        if pid != 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            files.close()
            if pid > 0:
                # Here too: a signal for the group may be the next message, and the rank may not have run at all yet.
                with suppress(ProcessLookupError, PermissionError):  # it has ended, or executes its program already
                    os.setpgid(pid, pid)
                self._ranks[pid] = rank
                self._channel.send({"type": "started", "rank": rank, "pid": pid})
            else:
                self._channel.send({"type": "unstarted", "rank": rank, "problem": self._refused})
            return None
        self._give_up()
        files = files.moved()
        if files.events is not None and files.grant is None:
            environment = {**environment, EVENTS_VARIABLE: str(files.events)}
        if files.servers is not None:
            environment = {**environment, SERVER_PAGE_VARIABLE: str(files.servers)}
        settle(parent=server, files=files, environment=environment)
        program = self._program
        if SERVER_VARIABLE in environment:
            program = replace(
                program, target="unisono.servers", module=True, arguments=(), recover=False, numa_binding=None
            )
        process = RankProcess(
            rank=rank,
            program=program,
            report=move_out_of_the_way(self._report),
            files=files,
            scratch=self._scratch,
            preloaded=self._preloaded,
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if not self._program.forked:
            execute(process)
        return process

    def _read_reports(self) -> None:
        with suppress(BlockingIOError):
            for line in os.read(self._reports, 1 << 16).splitlines():
                rank, code, time_ns = map(int, line.split())
                self._channel.send({"type": "failing", "rank": rank, "code": code, "time_ns": time_ns})

    def _report_ended_ranks(self) -> None:
        """Reap the children that have ended, and tell the agent which ranks they were."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, code = ended[0], os.waitstatus_to_exitcode(ended[1])
                self._leftovers.note(pid)
                if pid in self._ranks:
                    # A report written before the exit must arrive before it, even if it came after the last poll.
                    self._read_reports()
                    message: dict[str, Any] = {"rank": self._ranks.pop(pid), "code": code}
                    self._channel.send({"type": "exited", **message, "time_ns": time.monotonic_ns()})

    def _give_up(self) -> None:
        """Restore signals and close the server's files in a rank."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for signum, disposition in self._dispositions.items():
            signal.signal(signum, disposition)
        self._close_files()

    def _close_files(self) -> None:
        """Close the server's files in a process that it forked. A rank keeps the pipe for its report."""
        self._channel.close()
        for file in (self._reports, self._wakeups, self._wakeup, self._guardian):
            os.close(file)

    def _end(self) -> NoReturn:
        end_descendants(leftovers=self._leftovers, hurry=self._channel.closed)
        remove_scratch(self._scratch)
        # Unloading torch takes 0.1 s, and there is nothing here to flush.
        os._exit(0)


def _join_hosts(hosts: dict[str, Any]) -> JoinedHosts:
    """Begin to meet the other hosts of the job, in the process that hosts stores."""
    # Not at the top: these import torch, or are not needed on one machine.
    from unisono.launch.hosts.addresses import HostAddresses  # noqa: PLC0415
    from unisono.launch.hosts.host_settings import HostSettings  # noqa: PLC0415
    from unisono.launch.hosts.member import HostMember  # noqa: PLC0415

    # torch writes about each connection that another host breaks, with a stack; the agent tells it in a sentence.
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)  # Python's own errors are still shown
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    return HostMember(
        HostSettings(**hosts["settings"]),
        HostAddresses(**hosts["addresses"]),
        ranks=hosts["ranks"],
        role=hosts["role"],
        flags=hosts["flags"],
        agent=Channel(socket.socket(fileno=hosts["link"])),
    )


def _group_of(pid: int) -> int | None:
    """Return the process group of a process; None if it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
