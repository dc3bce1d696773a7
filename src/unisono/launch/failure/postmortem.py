"""Reports on a failed generation: one for the terminal, report.json, and tracebacks for the log files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.launch.failure.failure_report import Circumstances, headline, render, report_as_data
from unisono.launch.generation import Generation
from unisono.launch.launch_job import LaunchJob
from unisono.launch.output.relay import Relay
from unisono.memory import MemoryCounters, evidence, read_counters

__all__ = ["Postmortem", "write_report"]


class Postmortem:
    """The report on a failed generation, all ranks of which have ended.

    Args:
        memory: The kernel's counters at the job's start.
        recoveries: The replacements of ranks so far (`launch.replacing`).
        remarks: Sentences to add: why no rank was replaced, why there is no restart.
    """

    def __init__(
        self,
        job: LaunchJob,
        generation: Generation,
        *,
        relay: Relay,
        memory: MemoryCounters,
        restarts: int,
        recoveries: Sequence[Mapping[str, Any]],
        remarks: Sequence[str],
    ) -> None:
        self._relay, self._generation = relay, generation
        self._verdict = verdict = generation.judge()
        # For absent ranks that had not finished, the remarks say what they were doing.
        missed = () if verdict.absent_finished else verdict.absent[:3]
        # Ranks that ended while they still handled an exception.
        ended = {failure.rank for failure in (verdict.cause, *verdict.same) if (failure.account or {}).get("handled")}
        told = []
        for rank in sorted({*missed, *ended}):
            doing, place = generation.observer.doing(rank), generation.places.get(rank, "")
            words = [doing, *([f"{place} when others had failed"] if place else [])]
            if situation := ", and ".join(filter(None, words)):
                told.append(f"rank {rank} was {situation}")
        self._circumstances = Circumstances(
            ranks=job.world_size,
            folder=str(Path.cwd()),
            evidence=evidence(verdict.cause.code, memory, read_counters()),
            log_files={rank: relay.log_files(rank) for rank in generation.ranks},
            restarts=restarts,
            max_restarts=job.max_restarts,
            mismatch=generation.observer.explain() or "",
            recoveries=recoveries,
            remarks=[*told, *remarks],
            run_id=job.run_id,
        )

    @property
    def headline(self) -> str:
        """The rank that was the cause, and what happened to it, in one line."""
        return headline(self._verdict, self._circumstances, most=100)

    @property
    def blamed(self) -> tuple[int, int]:
        """The rank that was the cause, and its exit code."""
        return self._verdict.rank, self._verdict.cause.code

    def text(self, *, colour: bool) -> str:
        """Return the report, one screen."""
        return render(self._verdict, self._circumstances, colour=colour)

    def write(self) -> None:
        """Complete the log files: add tracebacks that ranks have not printed, and report.json of the attempt."""
        for failure in self._generation.failures:
            if failure.account is not None and not failure.account.get("printed"):
                self._relay.log(failure.rank, failure.account["traceback"])
        report = report_as_data(self._verdict, self._circumstances)
        write_report(report, relay=self._relay, attempt=self._generation.attempt)


def write_report(report: Mapping[str, Any], *, relay: Relay, attempt: int) -> None:
    """Write report.json of an attempt into the log folder, if there is one; if that fails, print a message."""
    if relay.folder is None:
        return
    target = relay.folder / f"attempt_{attempt}" / "report.json"
    partial = target.with_suffix(".partial")
    try:
        target.parent.mkdir(exist_ok=True)
        partial.write_text(json.dumps(report, indent=2) + "\n")
        partial.replace(target)
    except OSError as error:
        relay.say(f"{target} could not be written: {error.strerror}")
