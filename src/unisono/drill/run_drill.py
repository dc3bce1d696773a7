"""A drill from start to end: two calm runs, a plan, a disturbed run, and the comparison. Start at `Drill.run`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from unisono.drill.differences import differences
from unisono.drill.drill_errors import DrillFailedError, NoDrillError
from unisono.drill.fault_plan import Change, Fault, draw_plan
from unisono.drill.injector import Injector, Resize, Strike, refuse
from unisono.drill.job_log import JobLog
from unisono.drill.job_process import JobProcess, report_of
from unisono.launch import LaunchJob

__all__ = ["Drill", "Outcome", "Reporter", "RunFacts"]

_LEAST_STEPS = 3
_LOOK_S = 0.05
_ASK_S = 1.0
"""How often calm runs are asked whether ranks can be replaced."""
_STUCK_S = 5.0
"""The least time after which a rank is stuck, unless the user gives one."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The outcome of one run."""

    name: str
    steps: int
    seconds: float
    """From its start to its end."""


@dataclass(slots=True)
class Outcome:
    """The results of a drill so far."""

    stuck_s: float = 0.0
    """The time after which a rank was stuck."""
    runs: list[RunFacts] = field(default_factory=list)
    done: list[Strike | Resize] = field(default_factory=list)
    """The faults that have been injected, and the changes of the number of ranks."""
    planned: int = 0
    """The number of faults and changes that there were to be."""
    ranks: int = 0
    """The number of ranks at the end of the disturbed run."""
    differences: list[str] = field(default_factory=list)
    """How the disturbed run differs from the calm ones, as sentences."""
    digests: dict[str, str] = field(default_factory=dict)
    """Digests of the parts of the state at the end of the calm runs."""


class Reporter(Protocol):
    """Shows the progress of a drill."""

    def running(self, name: str, log: JobLog, done: Sequence[Strike | Resize]) -> None:
        """Show how far a run has come, and what has been injected so far. It may be called often."""

    def ended(self, facts: RunFacts, remark: str) -> None:
        """Tell that a run has ended."""

    def struck(self, strike: Strike | Resize) -> None:
        """Tell what became of a fault, or of a change of the number of ranks."""


class Drill:
    """A drill on one script.

    Args:
        job: The script and its ranks, two or more.
        kinds: The kinds of faults.
        every: There is one fault in so many steps.
        seed: Draws them.
        sizes: The numbers of ranks that follow in turn.
        environment: The variables of the ranks.
        folder: Gets a folder for each run.
        reporter: Shows the progress.
    """

    def __init__(
        self,
        job: LaunchJob,
        *,
        kinds: Sequence[str],
        every: int,
        seed: int,
        sizes: Sequence[int],
        environment: Mapping[str, str],
        folder: Path,
        reporter: Reporter,
    ) -> None:
        self._job, self._kinds, self._every, self._seed, self._sizes = job, kinds, every, seed, sizes
        self._environment, self._folder, self._reporter = environment, folder, reporter
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Run the drill, and return what came out of it.

        Raises:
            DrillFailedError: A run has failed, the script is not deterministic, or its ranks cannot be replaced.
            NoDrillError: The script has no Trainer, or is too short.
            LaunchError: A launcher does not answer.
        """
        outcome = self.outcome
        first, first_facts = self._calm("first calm run")
        if not first.has_trainer:
            raise NoDrillError(
                f"{self._job.target} has made no unisono.Trainer, whose runs alone can be compared and go on after "
                "the death of a rank"
            )
        if not first.ends():
            raise NoDrillError(
                f"{self._job.target} has not come to the end of a loop over trainer.epochs, where runs are compared: "
                "use one, or trainer.fit"
            )
        plan = self._draw(first)
        self._reporter.ended(first_facts, "")
        second, second_facts = self._calm("second calm run")
        if found := differences(first, second):
            raise DrillFailedError(
                f"the script is not deterministic: two calm runs of the same script differ, and {'; '.join(found)}. "
                "Give each source of random numbers a seed, and let nothing depend on time"
            )
        self._reporter.ended(second_facts, "the same bits")
        outcome.digests = next(iter(first.ends().values()))
        outcome.planned = len(plan)
        outcome.stuck_s = self._job.stuck_timeout_s or max(_STUCK_S, round(3 * second.longest_s))
        disturbed = self._disturbed(plan, second, max(facts.seconds for facts in outcome.runs))
        may_miss = sum(0 in each["ranks"] for each in disturbed.recoveries)
        outcome.differences = differences(first, disturbed, may_miss=may_miss)
        return outcome

    def _draw(self, calm: JobLog) -> list[Fault | Change]:
        steps, most, program = len(calm.steps), calm.virtual_ranks, self._job.target
        if (size := max(self._sizes, default=0)) > most:
            raise NoDrillError(
                f"--scale {size} is too much for {program}: it has {most} virtual ranks, and each rank needs one"
            )
        plan = draw_plan(
            self._kinds,
            ranks=self._job.ranks,
            steps=steps,
            every=self._every,
            seed=self._seed,
            sizes=self._sizes,
        )
        if steps < _LEAST_STEPS or not any(isinstance(each, Fault) for each in plan):
            raise NoDrillError(
                f"{program} has {steps} step{'s' * (steps != 1)}, and a drill needs {_LEAST_STEPS}: there is no fault "
                "in the first one and in the last one. Give it more data or epochs"
            )
        return plan

    def _calm(self, name: str) -> tuple[JobLog, RunFacts]:
        """Run the script undisturbed."""
        process = self._start(name, replace(self._job, stuck_timeout_s=None))
        log, asked_s = JobLog(process.folder), 0.0

        def look() -> float:
            nonlocal asked_s
            if log.latest and time.monotonic() > asked_s + _ASK_S:
                asked_s = time.monotonic()
                refuse(process.ranks())
            return _LOOK_S

        facts = self._follow(process, log, name, look)
        if log.recoveries:
            raise DrillFailedError(
                f"in the {name}, {log.recoveries[0]['what']}, with no fault from the drill", report_of(process.folder)
            )
        return log, facts

    def _disturbed(self, plan: Sequence[Fault | Change], calm: JobLog, calm_s: float) -> JobLog:
        name, outcome = "disturbed run", self.outcome
        process = self._start(name, replace(self._job, stuck_timeout_s=outcome.stuck_s))
        log = JobLog(process.folder)
        injector = Injector(
            plan,
            process=process,
            log=log,
            steps=len(calm.steps),
            step_s=calm.step_s,
            patience_s=60 + 2 * outcome.stuck_s + 3 * calm_s,
            tell=self._reporter.struck,
        )
        outcome.done = injector.done
        try:
            facts = self._follow(process, log, name, injector.tick, injector.done)
        finally:
            injector.close()
        if not any(isinstance(each, Strike) for each in injector.done):
            raise NoDrillError(
                f"the run was over before a fault could be injected: its {len(calm.steps)} steps take "
                f"{1000 * calm.step_s:.1f} ms each. Give it more data or epochs"
            )
        outcome.ranks = len(log.ends())
        self._reporter.ended(facts, f"{len(injector.done)} of {outcome.planned} faults")
        return log

    def _start(self, name: str, job: LaunchJob) -> JobProcess:
        folder = self._folder / name.replace(" ", "-")
        return JobProcess(job, environment=self._environment, folder=folder)

    def _follow(
        self, process: JobProcess, log: JobLog, name: str, tick: _Tick, done: Sequence[Strike | Resize] = ()
    ) -> RunFacts:
        """Wait for the end of a run."""
        begin_s = time.monotonic()
        try:
            while (code := process.poll()) is None:
                log.read()
                pause_s = tick()
                self._reporter.running(name, log, done)
                time.sleep(pause_s)
        finally:
            process.end()
        log.read()
        if code:
            raise DrillFailedError(
                f"the {name} ended with exit code {code}; its report is above", report_of(process.folder)
            )
        facts = RunFacts(name, len(log.steps), time.monotonic() - begin_s)
        self.outcome.runs.append(facts)
        return facts


class _Tick(Protocol):
    def __call__(self) -> float:
        """Do what is due, and return after how many seconds to come again."""
