"""`unisono.spawn`: runs a function on several ranks, from a script, a notebook cell or an interactive prompt.

The signature and the exceptions are those of `torch.multiprocessing.spawn`. The ranks are those of `unisono run`:
forked from a process that has imported torch, with the environment of torchrun, ended together. Start reading
at `spawn`.
"""

from __future__ import annotations

import atexit
import codecs
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any, Literal, TextIO

from unisono.errors import LaunchError
from unisono.launch.failure.root_cause import name_signal
from unisono.launch.limits import describe_failed_fork
from unisono.launch.spawn.function_call import FunctionCall, RankReport, pack, read_reports

__all__ = ["SpawnContext", "spawn"]

_STARTER = (
    "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    "from unisono.launch.spawn.agent_process import main; main()"
)
_POLL_S = 0.01
_EXIT_S = 5.0
"""For how long a rank that has raised an exception may take to end, before it is killed with the others."""
_NOTICE_S = 0.5
"""The time in which the agent notices the end of a rank, and ends the others."""


def spawn(  # noqa: PLR0917  the signature of torch.multiprocessing.spawn
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: Literal["fork", "forkserver", "spawn"] = "fork",
) -> SpawnContext | None:
    """Call `fn(rank, *args)` on `nprocs` ranks of this machine, and wait until all have returned.

    Each rank is a process with the environment of torchrun, so `init_process_group()` needs no arguments. If one fails,
    the others are ended. The ranks' output appears in this process's `sys.stdout` and `sys.stderr`.

    Args:
        fn: The function. Its return value is dropped.
        args: Its arguments after the rank. CPU tensors and the queues, locks, events, pipes and managers of
            multiprocessing are shared with the ranks; everything else is copied.
        nprocs: The number of ranks.
        join: False to return at once.
        daemon: True to end ranks that still run when this process exits, False to wait for them.
        start_method: "fork" to fork ranks from a process that has imported torch, "spawn" to start an interpreter for
            each. "forkserver" is the same as "fork".

    Returns:
        None; with `join=False`, a context with `join()` and `pids()`.

    Raises:
        ValueError: `nprocs` is below 1, or `start_method` is unknown.
        torch.multiprocessing.ProcessRaisedException: `fn` raised an exception; the message contains its traceback.
        torch.multiprocessing.ProcessExitedException: A rank was killed, or exited with a code other than 0.
        LaunchError: The job could not be started, or was ended for a reason other than a rank, such as a signal.
        RuntimeError: A rank calls this while it imports the script: put the call under `if __name__ == "__main__":`.
        Exception: `fn` or `args` cannot be sent to another process; the exception is pickle's.
    """
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}: give 1 or more")
    if start_method not in ("fork", "forkserver", "spawn"):
        raise ValueError(f"start_method={start_method!r} is not known: give 'fork', 'forkserver' or 'spawn'")
    method = "spawn" if start_method == "spawn" else "fork"
    context = SpawnContext(FunctionCall(fn, tuple(args)), ranks=nprocs, daemon=daemon, start_method=method)
    if not join:
        return context
    while not context.join():
        pass
    return None


class SpawnContext:
    """Ranks that have been started. Stands in for the context of `torch.multiprocessing.spawn` with `join=False`."""

    def __init__(self, call: FunctionCall, *, ranks: int, daemon: bool, start_method: str) -> None:
        packed = pack(call)
        # Locks, queues and shared memory in the arguments vanish with the last object here that refers to them.
        self._call: FunctionCall | None = call
        self._ranks, self._daemon, self._owner = ranks, daemon, os.getpid()
        self._failure: dict[str, int] | None = None
        self._unread = b""
        self._over = False
        self._known: list[RankReport] | None = None
        self._reports = os.memfd_create("unisono-reports")
        fcntl.fcntl(self._reports, fcntl.F_SETFL, os.O_APPEND)
        content = os.memfd_create("unisono-call")
        with open(content, "wb", closefd=False) as file:
            file.write(packed.data)
        self._events, events = os.pipe()
        caller, self._lifeline = os.pipe()  # it is closed when this process ends, for whatever reason
        passed = {"packed": content, "reports": self._reports, "events": events, "caller": caller}
        facts = {**passed, "ranks": ranks, "start_method": start_method, "files": packed.files}
        streams = [_foreign_stream(sys.stdout, sys.__stdout__, 1), _foreign_stream(sys.stderr, sys.__stderr__, 2)]
        out, err = (None if stream is None else subprocess.PIPE for stream in streams)
        try:
            self._agent = subprocess.Popen(
                [sys.executable, "-c", _STARTER, json.dumps(facts)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                pass_fds=[*passed.values(), *packed.files],
                start_new_session=True,  # Ctrl-C is for this process alone, which passes it on once
            )
        except OSError as error:
            for number in (self._reports, self._events, self._lifeline):
                os.close(number)
            raise LaunchError(f"no process could be started: {describe_failed_fork(error)}") from error
        finally:
            for number in (content, events, caller):
                os.close(number)
        pipes = zip((self._agent.stdout, self._agent.stderr), streams, strict=True)
        self._pumps = [
            threading.Thread(target=_pump, args=(pipe, stream), daemon=True)
            for pipe, stream in pipes
            if pipe is not None and stream is not None
        ]
        for pump in self._pumps:
            pump.start()
        atexit.register(self._at_exit)

    def pids(self) -> list[int]:
        """Return the process ids of the ranks, in order. Waits until all have started, or the job has ended."""
        while not self._over and len(self._pids()) < self._ranks:
            self._turn(_POLL_S)
        return [pid for _, pid in sorted(self._pids().items())]

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Wait until all ranks have ended. Ctrl-C ends them.

        Args:
            timeout: The number of seconds to wait for the end or the failure of ranks; None waits without a limit.
            grace_period: How many seconds the other ranks have to end when one has raised an exception, before they are
                killed. The default, and the limit after any other failure, is 30. They get SIGTERM as soon as one has
                failed, even if this method is not called.

        Returns:
            True if all ranks have ended, False after the timeout.

        Raises:
            torch.multiprocessing.ProcessRaisedException: The function raised an exception.
            torch.multiprocessing.ProcessExitedException: A rank was killed, or exited with a code other than 0.
            LaunchError: The job could not be started, or was ended for a reason other than a rank, such as a signal.
        """
        try:
            if not self._wait_for_news(timeout, pause_s=None if grace_period is None else _POLL_S):
                return False
            if not self._wait_for_end(grace_period):
                self._kill()
        except KeyboardInterrupt:
            self._interrupt()
            raise
        self._close()
        if self._failure is not None:
            raise self._exception(**self._failure)
        if self._agent.returncode != 0:
            raise LaunchError(f"the ranks were ended, with exit code {self._agent.returncode}; the reason is above")
        return True

    def _wait_for_news(self, timeout_s: float | None, *, pause_s: float | None) -> bool:
        """Wait until a rank has failed or all have ended; return False after the timeout.

        The agent reports a failure when all have ended. With a pause, the ranks' own reports are read meanwhile.
        """
        deadline_s = _deadline(timeout_s)
        while not self._over and self._failure is None:
            if pause_s is not None and any(report.traceback is not None for report in self._told()):
                return True
            left_s = _left(deadline_s)
            shortest_s = min((time_s for time_s in (left_s, pause_s) if time_s is not None), default=None)
            if not self._turn(shortest_s) and left_s == 0:
                return False
        return True

    def _wait_for_end(self, timeout_s: float | None) -> bool:
        deadline_s = _deadline(timeout_s)
        while not self._over:
            if not self._turn(_left(deadline_s)):
                return False
        return True

    def _kill(self) -> None:
        """Kill the ranks that are left after one has raised an exception, which stays the cause."""
        raised = next((report for report in self._told() if report.traceback is not None), None)
        if raised is not None and self._failure is None:
            # The agent must see its end, or it would take the end of another rank for the cause.
            _wait_for_exit(raised.pid, _EXIT_S)
            self._wait_for_end(_NOTICE_S)
        while not self._over:
            self._agent.terminate()  # it is ending the job already, so this is the second request: it kills
            self._wait_for_end(_NOTICE_S)
        if raised is not None and self._failure is None:
            self._failure = {"rank": raised.rank, "code": 1}

    def _turn(self, timeout_s: float | None) -> bool:
        """Read the agent's messages; return False if none came, and the agent has not ended, within that time."""
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        if not poll.poll(None if timeout_s is None else 1000 * timeout_s):
            return False
        data = os.read(self._events, 1 << 12)
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._failure = self._failure or json.loads(line)
        self._over = not data
        return True

    def _interrupt(self) -> None:
        """End the job for Ctrl-C. Each further one is passed on too, and kills the ranks."""
        while not self._over:
            self._agent.send_signal(signal.SIGINT)
            with suppress(KeyboardInterrupt):
                self._wait_for_end(None)
        self._close()

    def _close(self) -> None:
        """Wait for the agent's end, and release everything that only running ranks need. May be called again."""
        if self._known is None:
            self._agent.wait()
            for pump in self._pumps:
                pump.join()
            self._known = read_reports(self._reports)
            for number in (self._reports, self._events, self._lifeline):
                os.close(number)
            atexit.unregister(self._at_exit)
            self._call = None

    def _at_exit(self) -> None:
        if os.getpid() != self._owner:  # a copy that this process has forked
            return
        if self._daemon:
            self._agent.terminate()
        try:
            self._wait_for_end(None)
        except KeyboardInterrupt:
            self._interrupt()
        self._close()
        if self._failure is not None and not self._daemon:
            print(f"unisono.spawn: {self._exception(**self._failure)}", file=sys.stderr)

    def _told(self) -> list[RankReport]:
        return read_reports(self._reports) if self._known is None else self._known

    def _pids(self) -> dict[int, int]:
        return {report.rank: report.pid for report in self._told()}

    def _exception(self, *, rank: int, code: int) -> Exception:
        # The launcher's side starts without torch.
        from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException  # noqa: PLC0415

        pid = self._pids().get(rank, -1)
        for report in self._told():
            if report.rank == rank and report.traceback is not None:
                message = f"\n\n-- Process {rank} terminated with the following error:\n{report.traceback}"
                return ProcessRaisedException(message, rank, pid)
        if code < 0:
            name = name_signal(-code)
            return ProcessExitedException(f"process {rank} terminated with signal {name}", rank, pid, code, name)
        return ProcessExitedException(f"process {rank} terminated with exit code {code}", rank, pid, code)


def _foreign_stream(stream: TextIO | None, original: TextIO | None, number: int) -> TextIO | None:
    """Return a stream that only this process can write to, as in a notebook; None if ranks can have the file itself."""
    if stream is None:
        return None
    with suppress(OSError, ValueError):
        stream.flush()
        if stream is original and stream.fileno() == number:
            return None
    return stream


def _wait_for_exit(pid: int, timeout_s: float) -> None:
    """Wait until a process has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll(1000 * timeout_s)
    finally:
        os.close(process)


def _pump(pipe: IO[bytes], stream: TextIO) -> None:
    """Pass on the output of ranks, until the last of them has ended."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with pipe:
        while data := os.read(pipe.fileno(), 1 << 16):
            with suppress(OSError, ValueError):  # the stream was closed: ranks must not block
                stream.write(decoder.decode(data))
                stream.flush()


def _deadline(timeout_s: float | None) -> float | None:
    return None if timeout_s is None else time.monotonic() + timeout_s


def _left(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
