"""Changes the number of ranks of a running job, between two steps: the agent's side of `unisono scale`.

The ranks go on while processes for further ranks start and run the script up to its Trainer. Once these wait there, the
new number is written into the pages of all ranks, which agree on it in their next step and stop before the next batch.
Then the agent decides who the ranks are, and all meet as after a death. Ranks that are too many end themselves. Until
that decision, the change can be given up, and nothing is lost. Start reading at `Scaling.tick`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any, Literal

from unisono.errors import LaunchError
from unisono.launch.failure.root_cause import name_signal
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.launch_job import LaunchJob
from unisono.launch.limits import check_open_files
from unisono.launch.output.relay import Relay
from unisono.launch.replacing import Fork, Replacing
from unisono.text import name_ranks
from unisono.watch.figures import plural

__all__ = ["Scaling"]

_POLL_S = 0.005
"""How often pages are read during a change."""

_State = Literal["idle", "ending", "starting", "waiting", "changing", "withdrawn"]


class Scaling:
    """The changes in one generation of ranks, one at a time.

    Args:
        fork: Starts the process of a rank with its files.
    """

    def __init__(
        self,
        job: LaunchJob,
        generation: Generation,
        replacing: Replacing,
        *,
        server: ForkServerHandle,
        relay: Relay,
        fork: Fork,
    ) -> None:
        self._job, self._generation, self._replacing = job, generation, replacing
        self._server, self._relay, self._fork = server, relay, fork
        self._state: _State = "idle"
        self._wanted = self._before = generation.size
        self._paused_s: float | None = None
        self._step = 0
        self._kill_s: float | None = None
        self._outcome: dict[str, Any] = {}

    @property
    def status(self) -> dict[str, Any]:
        """The change under way, or how the latest one has ended, for `unisono scale`."""
        return {"state": self._state, "ranks": self._generation.size, "wanted": self._wanted, **self._outcome}

    @property
    def wanted(self) -> int:
        """The number of ranks once the change under way is over."""
        return self._generation.size if self._state in ("idle", "withdrawn") else self._wanted

    def request(self, size: int) -> str:
        """Begin to change the number of ranks; return why that is not possible, or "" if it is."""
        if problem := next(self._problems(size), ""):
            return problem
        self._wanted, self._before, self._outcome, self._paused_s = size, self._generation.size, {}, None
        self._state = "ending"
        self.tick()
        return ""

    def tick(self) -> None:
        """Do what is due."""
        if self._state == "ending" and not self._outside():
            self._state = "starting"
            self._start()
        if self._state == "starting" and all(self._waits(rank) for rank in range(self._before, self._wanted)):
            self._state = "waiting"
            self._generation.want(self._wanted)
        if self._state == "waiting":
            self._look()
        if self._state == "changing":
            self._finish()
        if self._state == "withdrawn" and not any(self._waits(rank) for rank in range(self._generation.size)):
            self._state = "idle"
        if self._kill_s is not None and time.monotonic() >= self._kill_s:
            self._kill_s = None
            if late := self._outside():
                self._relay.say(
                    f"{name_ranks(late)} left the run and did not end within {self._job.shutdown_timeout_s:g} s; killed"
                )
                self._server.signal(signal.SIGKILL, late, group=True)

    def _start(self) -> None:
        """Start the processes of further ranks."""
        self._kill_s = None
        for rank in range(self._before, self._wanted):
            files = self._generation.open(rank)
            self._generation.pages[rank].mark_new()
            self._fork(rank, files)

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is due, by the monotonic clock; None if nothing is under way."""
        return self._kill_s if self._state == "idle" else time.monotonic() + _POLL_S

    def on_exit(self, rank: int, code: int) -> None:
        """Handle the end of a process that is not one of the ranks: one that waits to be, or has been."""
        if self._state in ("starting", "waiting") and rank in range(self._before, self._wanted):
            how = f"was killed by {name_signal(-code)}" if code < 0 else f"ended with code {code}"
            if code > 0 and (account := self._generation.observer.failure(rank)) is not None:
                self._replacing.show_traceback(rank, account)
                how = f"raised {account['type'].rpartition('.')[2]}"
            self.give_up(f"rank {rank} {how} before it had joined the others")

    def on_unstarted(self, rank: int, problem: str) -> bool:
        """Handle that a process could not be started. Return False if it was to be one of the present ranks."""
        if rank < self._generation.size:
            return False
        self.give_up(f"rank {rank} could not be started: {problem}")
        return True

    def on_members_end(self) -> None:
        """Handle the end of all ranks, so that no process waits to become one."""
        self.give_up("the run has ended")

    def give_up(self, reason: str) -> None:
        """Leave the number of ranks as it is, if a change is under way that all ranks have not been told of."""
        if self._state not in ("ending", "starting", "waiting"):
            return
        generation = self._generation
        self._state, self._outcome = "withdrawn", {"problem": reason}
        generation.want(0)
        if others := self._outside():
            self._server.signal(signal.SIGKILL, others, group=True)
        self._relay.say(
            f"the job keeps its {plural(generation.size, 'rank')} and does not get {self._wanted}: {reason}"
        )

    def _problems(self, size: int) -> Iterator[str]:
        """Yield the reasons why the number of ranks cannot become `size`, the first one first."""
        job, generation = self._job, self._generation
        if size < 1:
            yield f"{size} is no number of ranks: a job has at least one"
        if not job.recover:
            yield "it runs with --recover off, and then its ranks do not change"
        if self._state != "idle":
            yield f"a change from {self._before} to {self._wanted} ranks is under way"
        ranks = [rank for rank in range(generation.size) if rank in generation.running]
        if generation.finished or len(ranks) < generation.size:
            yield "the run is about to end"
        pages = [generation.pages[rank] for rank in ranks]
        if not all(page.armed for page in pages):
            yield "its ranks have made no Trainer so far, and the number of ranks is that of a Trainer's run"
        yield from (page.refusal for page in pages if page.refusal)
        yield from (page.fixed_size for page in pages if page.fixed_size)
        most = min((page.virtual_ranks for page in pages), default=0)
        if size > most:
            yield f"{size} ranks are too many for {plural(most, 'virtual rank')}, of which each rank needs one"
        gpus = min((page.gpus for page in pages if page.gpus), default=size)
        if size > gpus:
            yield f"{size} ranks are too many for {plural(gpus, 'GPU')}, of which each rank needs one with NCCL"
        if job.stdin is not None and job.stdin >= size:
            yield f"rank {job.stdin} reads the terminal (--stdin), and would leave"
        try:
            check_open_files(size)
        except LaunchError as error:
            yield str(error)

    def _look(self) -> None:
        """Decide once all ranks wait between two steps."""
        generation, replacing = self._generation, self._replacing
        pages = [generation.pages[rank] for rank in range(generation.size)]
        if refusal := next(filter(None, (page.refusal for page in pages)), ""):
            self.give_up(refusal)
        elif generation.finished:
            self.give_up("the run has ended")
        elif any(self._waits(rank) for rank in range(generation.size)):
            now_s = time.monotonic()
            self._paused_s = now_s if self._paused_s is None else self._paused_s
            if replacing.is_calm and all(self._waits(rank) for rank in range(generation.size)):
                self._step = max(note.step for page in pages if (note := page.note) is not None)
                self._state = "changing"
                replacing.resize(self._wanted)
        else:
            self._paused_s = None

    def _finish(self) -> None:
        """Report the change once all ranks go on together."""
        generation, replacing = self._generation, self._replacing
        pages = [generation.pages[rank] for rank in range(generation.size)]
        if any(page.joined != replacing.number for page in pages):
            return
        assert self._paused_s is not None
        seconds = max(page.joined_ns for page in pages) / 1e9 - self._paused_s
        generation.want(0)
        self._state = "idle"
        self._outcome = {"before": self._before, "step": self._step, "seconds": round(seconds, 3)}
        self._kill_s = time.monotonic() + self._job.shutdown_timeout_s
        generation.observer.disregard_past(0.0, until_ns=min(page.joined_ns for page in pages))
        self._relay.say(
            f"{self._before} -> {plural(self._wanted, 'rank')} after step {self._step}; the run waited {seconds:.2f} s"
        )

    def _waits(self, rank: int) -> bool:
        """Return True if a process waits for a change of the number of ranks."""
        note = self._generation.pages[rank].note
        return note is not None and note.phase == "resize"

    def _outside(self) -> list[int]:
        """List the processes that are no ranks: that wait to be, or have been."""
        return sorted(rank for rank in self._generation.running if rank >= self._generation.size)
