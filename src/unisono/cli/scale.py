"""`unisono scale`: change the number of ranks of a running job."""

from __future__ import annotations

import time
from typing import Any

import click

from unisono.cli.ps import find_job
from unisono.cli.status_line import show_status
from unisono.errors import LaunchError
from unisono.launch.control import ask
from unisono.watch.figures import plural

__all__ = ["scale"]

_POLL_S = 0.05


@click.command(short_help="Change the number of ranks of a running job.")
@click.argument("words", metavar="[JOB] RANKS", nargs=-1, required=True)
def scale(words: tuple[str, ...]) -> int:
    """Change the number of ranks of a running job, between two of its steps.

    JOB is its number or name from `unisono ps`; it may be left out if only one job is running. The run goes on, with
    the same result, while further ranks start. Ends once all ranks train together. Of a job on several machines, RANKS
    is the number on all of them, and the command may be typed on any.
    """
    *names, number = words
    if len(names) > 1 or not number.lstrip("-").isdigit():
        raise click.UsageError(f"give a job and a number of ranks, such as `unisono scale {words[0]} 4`")
    ranks = int(number)
    job = find_job(names[0] if names else None)
    title = f"job {job['pid']} ({job['name']})"
    if job["world_size"] == ranks:
        click.echo(f"{title} has {plural(ranks, 'rank')} already")
        return 0
    answer = _ask(job, {"ask": "scale", "ranks": ranks}, title=title)
    if answer["problem"]:
        raise LaunchError(f"{title} keeps its {plural(answer['ranks'], 'rank')}: {answer['problem']}")
    status = _follow(job, title=title)
    if status["wanted"] != ranks:
        raise LaunchError(f"{title} gets {plural(status['wanted'], 'rank')}, which was asked for on another host")
    if problem := status.get("problem"):
        raise LaunchError(f"{title} keeps its {plural(status['ranks'], 'rank')}: {problem}")
    change = f"{status['before']} -> {plural(ranks, 'rank')} after step {status['step']}"
    click.echo(f"{title}: {change}; the run waited {status['seconds']:.2f} s")
    return 0


def _follow(job: dict[str, Any], *, title: str) -> dict[str, Any]:
    """Wait until the change is over, and return its status. The terminal shows what it waits for."""
    shown = ""
    while True:
        status = _ask(job, {"ask": "scaling"}, title=title)
        doing = {
            "asking": "the hosts agree",
            "ending": "ranks of the last change end",
            "starting": "new ranks come to their Trainer",
            "waiting": "the ranks come to the end of a step",
            "changing": "the ranks meet",
        }.get(status["state"], "")
        if doing != shown:
            shown = doing
            show_status(doing)
        if not doing:
            return status
        time.sleep(_POLL_S)


def _ask(job: dict[str, Any], question: dict[str, Any], *, title: str) -> dict[str, Any]:
    answer = ask(job["pid"], question)
    if answer is None:
        raise LaunchError(f"{title} has just ended")
    return answer
