"""`unisono ps` and `unisono stacks`: look at running jobs of this user on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from unisono.errors import LaunchError
from unisono.launch.control import ask, ask_all, running_jobs
from unisono.launch.hang.stacks import read_state
from unisono.watch.figures import format_duration

__all__ = ["ps", "stacks"]

_PATIENCE_S = 1.0
_COLUMNS = ("JOB", "NAME", "RANKS", "SINCE", "STEP", "DIRECTORY")


@click.command(short_help="List running jobs of this user on this machine.")
def ps() -> int:
    """List running jobs of this user on this machine."""
    jobs, silent = _jobs()
    if not jobs and not silent:
        click.echo("no job of yours is running on this machine", err=True)
        return 0
    rows = [_COLUMNS, *sorted([*map(_row, jobs), *map(_silent_row, silent)], key=lambda row: int(row[0]))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS) - 1)]
    for *cells, last in rows:
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), last]))
    return 0


@click.command(short_help="Show where all ranks of a running job are.")
@click.argument("job", required=False)
def stacks(job: str | None) -> int:
    """Show where all ranks of a running job are: Python stacks and collectives.

    JOB is its number or name from `unisono ps`; it may be left out if there is one only. The job goes on undisturbed,
    and no privilege is needed.
    """
    found = _find(job)
    answer = ask(found["pid"], {"ask": "stacks"})
    if answer is None:
        raise LaunchError(f"job {found['pid']} ({found['name']}) has just ended")
    click.echo(answer["text"])
    return 0


def _jobs() -> tuple[list[dict[str, Any]], list[int]]:
    """Ask all jobs for what is shown of them. Returns: their answers, and the agents that do not answer."""
    answers = ask_all(running_jobs(), {"ask": "job"}, patience_s=_PATIENCE_S)
    told = [answer for answer in answers.values() if answer is not None]
    return told, [agent for agent, answer in answers.items() if answer is None]


def _find(job: str | None) -> dict[str, Any]:
    jobs, silent = _jobs()
    for agent in silent:
        if job == str(agent) or (job is None and not jobs):
            raise LaunchError(_describe_silent(agent))
    if job is not None:
        chosen = [found for found in jobs if job in (str(found["pid"]), found["name"], found["run_id"])]
    else:
        chosen = jobs
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join(f"{found['pid']} ({found['name']})" for found in (chosen or jobs))
    if not jobs:
        raise LaunchError("no job of yours is running on this machine")
    if not chosen:
        raise LaunchError(f"no running job is called {job!r}; running: {listed}")
    raise LaunchError(f"several jobs are running: name one of {listed}")


def _describe_silent(agent: int) -> str:
    if (state := read_state(agent).state) == "stopped":
        return f"job {agent} does not answer: its launcher is stopped; `kill -CONT {agent}` has it go on"
    return f"job {agent} does not answer: its launcher is {state}"


def _silent_row(agent: int) -> tuple[str, ...]:
    try:
        directory = str(Path(f"/proc/{agent}/cwd").readlink())
    except OSError:
        directory = "-"
    state = read_state(agent).state
    return str(agent), "(stopped)" if state == "stopped" else "(no answer)", "-", "-", "-", directory


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    ranks = str(job["ranks"]) if job["running"] == job["ranks"] else f"{job['running']} of {job['ranks']}"
    step = "-" if job["step"] is None else str(job["step"])
    return str(job["pid"]), job["name"], ranks, format_duration(time.time() - job["started_s"]), step, job["directory"]
