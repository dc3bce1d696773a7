"""The answers of an agent to other commands: `unisono ps`, `unisono top` and `unisono stacks`."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from unisono.launch.generation import Generation
from unisono.launch.hang.hang_report import render_stacks
from unisono.launch.launch_job import LaunchJob

__all__ = ["describe_activity", "describe_job", "describe_stacks"]


def describe_job(job: LaunchJob, *, running: Collection[int], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a job for `unisono ps`.

    Args:
        job: The job, with its present number of ranks.
        running: The processes that run; those with higher numbers than ranks have are left out.
        facts: What else is known, by name, such as the progress of its run.
    """
    return {
        "pid": os.getpid(),
        "name": Path(job.target).absolute().name,
        "run_id": job.run_id,
        "ranks": job.ranks,
        "running": sum(rank < job.ranks for rank in running),
        "directory": str(Path.cwd()),
        "arguments": list(job.arguments),
        **facts,
    }


def describe_activity(generation: Generation | None) -> list[dict[str, Any]]:
    """Return each rank that runs here, for `unisono top`: its process, and the calls in its status block.

    The ranks are not asked, so that nothing is disturbed.

    Args:
        generation: The ranks; None before they have been started.
    """
    if generation is None:
        return []
    ranks = []
    for found in generation.describe_ranks():
        doing, waits_s, part = generation.observer.activity(found["rank"])
        ranks.append({"rank": found["rank"], "pid": found["pid"], "doing": doing, "waits_s": waits_s, "waits": part})
    return ranks


def describe_stacks(generation: Generation | None, *, full: bool) -> dict[str, Any]:
    """Return where all ranks are, as a text for `unisono stacks`. Takes up to a second.

    Args:
        generation: The ranks; None before they have been started.
        full: True to show all frames.
    """
    situations = generation.observer.snapshot() if generation is not None else []
    return {"text": render_stacks(situations, now_ns=time.monotonic_ns(), folder=str(Path.cwd()), full=full)}
