"""The early end of a job: its ranks are asked to end, and killed if they do not. `Shutdown` is the state of it.

Start reading at `JobShutdown.begin`.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable
from dataclasses import replace

from unisono.launch.forkserver_handle import LAST_S, ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.launch_job import LaunchJob
from unisono.launch.output.relay import Relay
from unisono.launch.replacing import COMPANY_S
from unisono.launch.shutdown import Shutdown
from unisono.launch.spares import Spares
from unisono.text import name_ranks

__all__ = ["JobShutdown"]

_PATIENCE_S = 2.0
"""How long ranks may take to end after a failure before a message names those that the job waits for."""

_DOUBT_S = 0.5
"""How long to wait, when all that is known is a lost connection, for the failure of the rank that closed it."""

_POLL_S = 0.1
"""How often to look at ranks that the kernel is ending."""


class JobShutdown:
    """Ends the ranks of a job early. The agent's loop calls `advance` when `state.next_s` has come."""

    def __init__(self, job: LaunchJob, *, relay: Relay, server: ForkServerHandle) -> None:
        self._job, self._relay, self._server = job, relay, server
        self._generation: Generation | None = None
        self._spares: Spares | None = None
        self.state: Shutdown | None = None
        """Why and how ranks are being ended; None: they are not."""

    def cover(self, generation: Generation, spares: Spares) -> None:
        """End these ranks and spare processes, if need be, in place of earlier ones."""
        self._generation, self._spares = generation, spares

    @property
    def running(self) -> set[int]:
        """The ranks that run."""
        return self._generation.running if self._generation is not None else set()

    def begin(self, shutdown: Shutdown, signum: int, ranks: Iterable[int]) -> None:
        """Ask ranks to end by a signal."""
        # Where there are none, the fork server is killed once other hosts have been told why.
        limit_s = 0.0 if self._generation is None else self._job.shutdown_timeout_s
        self.state = replace(shutdown, begins_s=None, deadline_s=time.monotonic() + limit_s)
        self._end_spares()
        if self._generation is None:
            return
        self._generation.ends(failed=shutdown.failed or shutdown.host_lost)
        self._server.resume()
        # Only the ranks, not the processes they started: a rank that saves its work still needs its workers, and those
        # would also print tracebacks. A program that is not Python may be a shell that passes nothing on.
        group = not self._job.python
        for sent in (signum, signal.SIGCONT):  # a rank that is stopped would not notice
            self._server.signal(sent, ranks, group=group)

    def begin_for_signal(self, signum: int, reason: str) -> None:
        """End the job because the agent has got a signal."""
        shutdown = Shutdown(code=128 + signum, reason=reason, ranks=len(self.running))
        # A hangup or a quit would end Python without a chance to save; other signals are passed on as they are.
        as_term = (signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)
        self.begin(shutdown, signal.SIGTERM if signum in as_term else signum, self.running)

    def begin_for_loss(self, loss: str) -> None:
        """End the job because a process that it needs is lost, unless it is being ended."""
        if self.state is None:
            self.begin(Shutdown(code=1), signal.SIGTERM, self.running)
            self._relay.say(f"{loss}; ending the job")

    def begin_for_failure(self) -> None:
        """End the ranks because one has failed, at once or soon if the cause is sure; called at each failure."""
        assert self._generation is not None
        if self.state is None:
            now_s = time.monotonic()
            self.state = Shutdown(
                code=1,
                failed=True,
                begins_s=now_s + _DOUBT_S,
                dying_until_s=now_s + self._job.shutdown_timeout_s,
                dying_told_s=now_s + _PATIENCE_S,
            )
        if self.state.begins_s is None:
            return
        verdict = self._generation.judge()
        if verdict.sure and (verdict.cause.account is None or self.running <= self._generation.failed):
            self.end_failed()
        elif verdict.sure:
            self.state = replace(self.state, begins_s=min(self.state.begins_s, time.monotonic() + COMPANY_S))

    def advance(self) -> None:
        """Take the step that is due: ask ranks to end, name those that are waited for, or kill them."""
        shutdown, now_s = self.state, time.monotonic()
        if shutdown is None:
            return
        if shutdown.killed:
            if now_s >= shutdown.deadline_s:
                self.state = replace(shutdown, deadline_s=math.inf)
                self._relay.say(f"the fork server has not ended within {LAST_S:g} s; killed")
                self._server.kill()
        elif shutdown.begins_s is not None and now_s >= shutdown.begins_s:
            if not self._waits_for_dying(shutdown, now_s):
                self.end_failed()
        elif shutdown.waited_for_s is not None and now_s >= shutdown.waited_for_s:
            self.state = replace(shutdown, waited_for_s=None)
            if self.running:
                have = "has" if len(self.running) == 1 else "have"
                left_s = max(0.0, shutdown.deadline_s - now_s)
                self._relay.say(
                    f"the job has failed; the cause is told when {name_ranks(self.running)} {have} ended. Ranks "
                    f"that still run in {left_s:.0f} s are killed"
                )
        elif now_s >= shutdown.deadline_s:
            if deaf := self.running - self._generation.failed if self._generation is not None else set():
                grace = f"{self._job.shutdown_timeout_s:g} s"
                self._relay.say(f"{name_ranks(deaf)} did not end within {grace}; killed")
            self.kill()

    def _waits_for_dying(self, shutdown: Shutdown, now_s: float) -> bool:
        """Return True if the kernel is ending a rank, which may be the cause, and look again in a moment.

        If it were asked to end meanwhile, its end would count as the launcher's doing.
        """
        assert self._generation is not None
        if now_s >= shutdown.dying_until_s or not (dying := self._generation.dying):
            return False
        told_s = shutdown.dying_told_s
        if told_s is not None and now_s >= told_s:
            told_s = None
            self._relay.say(
                f"the job has failed; the cause is told when the kernel has ended {name_ranks(dying)}; it may be "
                "writing a core dump"
            )
        self.state = replace(shutdown, begins_s=now_s + _POLL_S, dying_told_s=told_s)
        return True

    def kill(self) -> None:
        """Kill the ranks that run."""
        assert self.state is not None
        deadline_s = time.monotonic() + LAST_S
        self._end_spares()
        self.state = replace(self.state, killed=True, begins_s=None, waited_for_s=None, deadline_s=deadline_s)
        if self._generation is not None:
            self._server.resume()
            # Only the ranks: processes they started end with the generation, and helpers among them clean up before.
            self._server.signal(signal.SIGKILL, self.running, group=False)
        else:
            self._server.kill()

    def end_failed(self) -> None:
        """Ask the ranks that have not failed to end; one that has failed may still be about to end.

        Does nothing if they have been asked.
        """
        assert self.state is not None
        if self.state.begins_s is None:
            return
        assert self._generation is not None
        if not self._generation.judge().sure:
            self._generation.look_at_leavers()
        self.begin(self.state, signal.SIGTERM, self.running - self._generation.failed)
        if self.running:
            self.state = replace(self.state, waited_for_s=time.monotonic() + _PATIENCE_S)

    def _end_spares(self) -> None:
        if self._spares is not None:
            self._spares.end()
