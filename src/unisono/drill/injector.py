"""Injects the faults of a plan into a run, and follows what becomes of each. Start reading at `Injector.tick`."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.drill.drill_errors import DrillFailedError
from unisono.drill.fault_plan import KINDS, Change, Fault
from unisono.drill.faults import inject, send
from unisono.drill.job_log import JobLog
from unisono.drill.job_process import JobProcess

__all__ = ["Injector", "Resize", "Strike", "refuse"]

_IDLE_S = 0.05
"""How often a run is looked at when nothing is due."""
_CHANGE_S = 0.02
"""How often a change of the number of ranks is looked at."""
_KILL_AFTER = 2
"""Steps after which a rank is killed that has needed no more memory, as the kernel does."""
_IGNORED_AFTER, _IGNORED_AFTER_S = 5, 4.0
"""Steps, and seconds, after which SIGTERM has had no effect. A rank other than 0 goes on for a second, and one step."""
_TERM_S = 3.0
"""So long before the end, SIGTERM goes to rank 0: others would go on for a second, and so to the end of the run."""


@dataclass(slots=True)
class Strike:
    """A fault that has been injected, and what became of it."""

    fault: Fault
    step: int
    """The steps that had been done, when it died if it has."""
    time_s: float
    """When, in Unix seconds."""
    time_ns: int
    """The same by the monotonic clock."""
    ranks: tuple[int, ...] = ()
    """The ranks that were replaced."""
    ended: str = ""
    """How the rank ended; "" if it has not."""
    phase: str = ""
    """Its work at that moment; "" if that is not known."""
    noticed_s: float | None = None
    """Seconds until the launcher has decided to replace it."""
    script_s: float | None = None
    """Seconds from then until the script had come to its Trainer in the new process; 0 if a spare had before."""
    resumed_s: float | None = None
    """Seconds until a step was done that had not been done before."""
    repeated: int | None = None
    """The number of steps that were computed again."""


@dataclass(slots=True)
class Resize:
    """A change of the number of ranks that has been asked for, and what became of it."""

    change: Change
    step: int
    """The steps that had been done when ranks changed, or when it was asked for if they have not."""
    time_s: float
    """When it was asked for, in Unix seconds."""
    before: int | None = None
    """The number of ranks before; None if they have not changed."""
    waited_s: float | None = None
    """Seconds that the run has waited."""
    problem: str = ""
    """Why it was not possible; "" if it was."""


class Injector:
    """The faults of one run.

    Args:
        plan: What is to happen, in the order of steps.
        process: The run.
        log: Its log, which the caller reads before each `tick`.
        steps: The number of steps that the run will have.
        step_s: How long a step takes.
        patience_s: How long it may take until all go on after a fault.
        tell: Called with each fault when it is over.
    """

    def __init__(
        self,
        plan: Sequence[Fault | Change],
        *,
        process: JobProcess,
        log: JobLog,
        steps: int,
        step_s: float,
        patience_s: float,
        tell: Callable[[Strike | Resize], None],
    ) -> None:
        self._plan, self._process, self._log = list(plan), process, log
        self._last, self._step_s, self._patience_s, self._tell = steps - 2, step_s, patience_s, tell
        self._brief_s = min(max(step_s / 20, 0.0005), 0.02)
        self._pids: dict[int, int] = {}
        self._due_s: float | None = None
        self._least_step = 0  # for the next fault
        self._strike: Strike | None = None
        self._resize: Resize | None = None
        self._pid = 0
        self._known = 0  # recoveries before the present fault
        self.done: list[Strike | Resize] = []
        """The faults that have been injected or asked for."""

    def tick(self) -> float:
        """Do what is due, and return after how many seconds to come again.

        Raises:
            DrillFailedError: No rank of this run can be replaced, or a rank has not been replaced in time.
            LaunchError: The launcher does not answer.
        """
        if self._strike is not None:
            return self._follow(self._strike)
        if self._resize is not None:
            return self._follow_change(self._resize)
        return self._go_on() if self._plan else _IDLE_S

    def _go_on(self) -> float:
        """Do what comes next in the plan if it is due, and return after how many seconds to come again."""
        log = self._log
        item = self._plan[0]
        ahead = max(item.step, self._least_step) - log.latest
        if ahead > 0:
            return min(_IDLE_S, max(self._brief_s, (ahead - 2) * self._step_s / 2))
        if log.latest > self._last:
            self._plan.clear()  # too late: nobody is replaced once a rank has finished
            return _IDLE_S
        if not self._pids:
            self._look()
        if isinstance(item, Change):
            self._plan.pop(0)
            self._begin_change(item)
        elif len(self._pids) == 1:
            self._plan.pop(0)  # a change did not come about, or is still to come: nobody would go on
        else:
            return self._await(item)
        return self._brief_s

    def _await(self, fault: Fault) -> float:
        """Inject a fault if it is due, and return after how many seconds to come again."""
        log = self._log
        if self._due_s is None:
            self._due_s = log.latest_s + fault.fraction * self._step_s
        if (left_s := self._due_s - time.time()) > 0:
            return min(left_s, self._brief_s)
        if fault.rank not in self._pids:
            fault = replace(fault, rank=fault.rank % len(self._pids))
        if fault.kind == "term" and (self._last - log.latest) * self._step_s < _TERM_S:
            fault = replace(fault, rank=0)
        times = time.time(), time.monotonic_ns()  # the launcher may notice before `inject` has returned
        if (pid := self._pids.get(fault.rank)) is not None and inject(fault.kind, pid):
            self._pid, self._known = pid, len(log.recoveries)
            self._strike = Strike(fault, log.latest, *times)
            self.done.append(self._strike)
            self._plan.pop(0)
        self._due_s = None
        self._pids.clear()
        return self._brief_s

    def _begin_change(self, change: Change) -> None:
        self._pids.clear()
        resize = Resize(change, self._log.latest, time.time(), problem=self._process.resize(change.ranks))
        self.done.append(resize)
        if resize.problem:
            self._tell(resize)
        else:
            self._resize = resize

    def _follow_change(self, resize: Resize) -> float:
        """Follow a change of the number of ranks, and return after how many seconds to look again."""
        status = self._process.resizing()
        if status["state"] not in ("idle", "withdrawn"):
            if time.time() > resize.time_s + self._patience_s:
                raise DrillFailedError(
                    f"{self._patience_s:.0f} s after {resize.change.ranks} ranks were asked for, the change is not over"
                )
            return _CHANGE_S
        resize.problem = status.get("problem", "")
        if not resize.problem:
            resize.before, resize.step, resize.waited_s = status["before"], status["step"], status["seconds"]
        self._resize = None
        self._tell(resize)
        return self._brief_s

    def close(self) -> None:
        """Tell about a fault after which the run has ended."""
        if self._strike is not None:
            self._note(self._strike)
            self._tell(self._strike)
            self._strike = None
        if self._resize is not None:
            self._resize.problem = "the run ended before"
            self._tell(self._resize)
            self._resize = None

    def _look(self) -> None:
        ranks = self._process.ranks()
        refuse(ranks)
        self._pids = {each["rank"]: each["pid"] for each in ranks}

    def _follow(self, strike: Strike) -> float:
        """Follow what becomes of a fault, and return after how many seconds to look again."""
        log, kind = self._log, strike.fault.kind
        entry = self._note(strike)
        if entry is not None and entry["number"] in log.resumed_s:
            self._end(strike)
        elif entry is None and kind == "oom" and log.latest >= strike.step + _KILL_AFTER:
            send(self._pid, signal.SIGKILL)
        elif (
            entry is None
            and kind == "term"
            and log.latest >= strike.step + _IGNORED_AFTER
            and time.time() > strike.time_s + _IGNORED_AFTER_S
        ):
            self._end(strike)
        elif time.time() > strike.time_s + self._patience_s:
            what = KINDS[kind].what.partition(",")[0].partition(":")[0]
            raise DrillFailedError(
                f"{self._patience_s:.0f} s after rank {strike.fault.rank} got its fault at step {strike.step + 1} "
                f"({kind}: {what}), no new step had been done: it was not replaced, or the others do not go on"
            )
        return self._brief_s

    def _note(self, strike: Strike) -> dict[str, Any] | None:
        """Note what the launcher tells about the end of a rank, and return that; None if there is nothing yet."""
        log = self._log
        entry = next((each for each in log.recoveries[self._known :] if strike.fault.rank in each["ranks"]), None)
        if entry is None:
            return None
        death = next(each for each in entry["deaths"] if each["rank"] == strike.fault.rank)
        strike.ranks, strike.ended, strike.phase = tuple(entry["ranks"]), death["how"], death["phase"]
        strike.step = death["step"]
        strike.noticed_s = (entry["decided_ns"] - strike.time_ns) / 1e9
        strike.script_s = entry["script_s"]
        self._least_step = max(each["step"] for each in entry["deaths"]) + 2
        if (resumed_s := log.resumed_s.get(entry["number"])) is not None:
            strike.resumed_s = resumed_s - strike.time_s
        if (call := log.calls.get(entry["number"])) is not None:
            strike.repeated = int(call == "trainer.step")
        return entry

    def _end(self, strike: Strike) -> None:
        self._strike = None
        self._tell(strike)


def refuse(ranks: Sequence[dict[str, Any]]) -> None:
    """Refuse a drill where no rank can be replaced alone.

    Raises:
        DrillFailedError: A rank has told so, and why.
    """
    for each in ranks:
        if each["refusal"]:
            raise DrillFailedError(
                f"no rank of this script can be replaced alone: {each['refusal']}. Under `unisono run`, a death ends "
                "the job, or starts all ranks again with --max-restarts; see docs/recovery.md"
            )
