"""`unisono ps` and `unisono stacks`: look at running jobs of this user on this machine."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from unisono.errors import LaunchError
from unisono.launch.control import ask, ask_all, running_jobs
from unisono.launch.hang.stacks import read_state
from unisono.text import clip
from unisono.watch.figures import format_bytes, format_elapsed

__all__ = ["find_job", "ps", "stacks"]

_Row = tuple[str, ...]

_PATIENCE_S = 1.0
_LONG_PATIENCE_S = 10.0
_PAUSE_S = 0.05
"""Between two questions whether other hosts have answered."""
_COLUMNS = ("JOB", "NAME", "RANKS", "SINCE", "STEP", "LOSS", "ARGUMENTS", "DIRECTORY")
_ARGUMENTS, _DIRECTORY = 6, 7
_FACTS = frozenset(("pid", "name", "run_id", "ranks", "running", "step", "directory"))
"""What an agent tells of its job at least."""
_SHOWN_IDS = 3
_LEAST = 12
"""Characters that a directory keeps on a narrow terminal."""


@click.command(short_help="List running jobs of this user on this machine.")
def ps() -> int:
    """List running jobs of this user on this machine.

    The exit code is 1 if the launcher of one does not answer.
    """
    jobs, silent = _jobs()
    if not jobs and not silent:
        click.echo("no job of yours is running on this machine", err=True)
        return 0
    rows = sorted([*map(_row, jobs), *map(_silent_row, silent)], key=lambda row: int(row[0]))
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in _table(rows, width=width):
        click.echo(line)
    for job in sorted(jobs, key=lambda job: int(job["pid"])):
        for name, figures in (job.get("tables") or {}).items():
            click.echo(f"{job['pid']}  table {_printable(name)}: {_table_line(figures)}")
    return 1 if silent else 0


def _table_line(figures: Mapping[str, Any]) -> str:
    """Return what an embedding table has, and what a step has looked up there last.

    >>> figures = {"rows": 7, "capacity": 9000, "ids": 1024, "nbytes": 65536, "hottest": [[3, 0.0211]]}
    >>> _table_line({**figures, "hit_rate": 0.98})
    '7 of 9,000 rows, 98.0 % of ids have one; a step reads 1,024 ids, 0.07 MB; most frequent: 3 (2.1 %)'
    """
    of = f" of {figures['capacity']:,}" if figures["capacity"] != figures["rows"] else ""
    hits = f", {figures['hit_rate']:.1%} of ids have one".replace("%", " %", 1) if "hit_rate" in figures else ""
    frequent = ", ".join(f"{row} ({100 * part:.1f} %)" for row, part in figures["hottest"][:_SHOWN_IDS])
    read = f"a step reads {figures['ids']:,} ids, {format_bytes(figures['nbytes'])}"
    return f"{figures['rows']:,}{of} rows{hits}; {read}; most frequent: {frequent}"


def _table(rows: Sequence[_Row], *, width: int | None) -> list[str]:
    """Return the lines of the table. Where it is wider than the terminal, it keeps what distinguishes jobs.

    First arguments that all jobs of a program share are left out. Then directories lose their beginning, then
    arguments their end.
    """
    shown = [_COLUMNS, *rows]
    if width is not None and _width(shown) > width:
        shown = [_COLUMNS, *_without_shared_arguments(rows)]
    if width is not None and (over := _width(shown) - width) > 0:
        longest = max(len(row[_DIRECTORY]) for row in shown)
        most = max(_LEAST, longest - over)
        shown = [(*row[:_DIRECTORY], clip(row[_DIRECTORY], most, at="start")) for row in shown]
    if width is not None and (over := _width(shown) - width) > 0:
        most = max(len(_COLUMNS[_ARGUMENTS]), max(len(row[_ARGUMENTS]) for row in shown) - over)
        shown = [(*row[:_ARGUMENTS], clip(row[_ARGUMENTS], most), row[_DIRECTORY]) for row in shown]
    widths = _widths(shown)
    return ["  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip() for row in shown]


def _widths(rows: Sequence[_Row]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _width(rows: Sequence[_Row]) -> int:
    return sum(_widths(rows)) + 2 * (len(_COLUMNS) - 1)


def _without_shared_arguments(rows: Sequence[_Row]) -> list[_Row]:
    """Return the rows without the arguments that all jobs of a program share, if there are several jobs."""
    by_name: dict[str, list[list[str]]] = {}
    for row in rows:
        by_name.setdefault(row[1], []).append(row[_ARGUMENTS].split(" "))
    found = []
    for row in rows:
        same = by_name[row[1]]
        words = row[_ARGUMENTS].split(" ")
        if len(same) > 1 and all(len(other) == len(words) for other in same):
            differing = {place for place, texts in enumerate(zip(*same, strict=True)) if len(set(texts)) > 1}
            # The flag in front of a value says what the value is.
            kept = differing | {place - 1 for place in differing if place > 0}
            kept = {place for place in kept if place in differing or words[place].startswith("-")}
            text = " ".join(words[place] for place in sorted(kept))
            short = text if len(kept) == len(words) else f"… {text}".rstrip()
            found.append((*row[:_ARGUMENTS], short, row[_DIRECTORY]))
        else:
            found.append(row)
    return found


@click.command(short_help="Show where all ranks of a running job are.")
@click.argument("job", required=False)
def stacks(job: str | None) -> int:
    """Show where all ranks of a running job are, on all of its hosts: Python stacks and collectives.

    JOB is its number or name from `unisono ps`; it may be left out if only one job is running. The job continues
    undisturbed, and no privileges are needed.
    """
    found = find_job(job)
    question = {"ask": "stacks"}
    while (answer := ask(found["pid"], question)) is not None and "question" in answer:
        question["question"] = answer["question"]  # other hosts are being asked
        time.sleep(_PAUSE_S)
    if answer is None:
        raise LaunchError(f"job {found['pid']} ({found['name']}) has just ended")
    click.echo(answer["text"])
    return 0


def _jobs() -> tuple[list[dict[str, Any]], list[int]]:
    """Ask all jobs for their rows, and return the answers and the agents that do not answer."""
    answers = ask_all(running_jobs(), {"ask": "job"}, patience_s=_PATIENCE_S)
    told = [answer for answer in answers.values() if answer is not None and _is_row(answer)]
    return told, [agent for agent, answer in answers.items() if answer is None or not _is_row(answer)]


def _is_row(answer: dict[str, Any]) -> bool:
    """Return True if an agent has told of its job; one of another version of unisono may not understand."""
    return answer.keys() >= _FACTS


def find_job(job: str | None) -> dict[str, Any]:
    """Return the facts of a running job, by its number or name; None: of the only one.

    Raises:
        LaunchError: There is no such job, or there are several.
    """
    jobs, silent = _jobs()
    for agent in silent:
        if job == str(agent) or (job is None and not jobs):
            jobs.append(_ask_again(agent))
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


def _ask_again(agent: int) -> dict[str, Any]:
    """Return the facts of a job that was silent: its launcher may be busy, as with the start of many ranks.

    Raises:
        LaunchError: It does not answer.
    """
    if read_state(agent).state != "stopped":
        answers = ask_all([agent], {"ask": "job"}, patience_s=_LONG_PATIENCE_S)
        if (answer := answers.get(agent)) is not None and _is_row(answer):
            return answer
    raise LaunchError(_describe_silent(agent))


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
    name = "(stopped)" if state == "stopped" else "(no answer)"
    return str(agent), name, "-", "-", "-", "-", "-", directory


def _row(job: dict[str, Any]) -> tuple[str, ...]:
    ranks = str(job["ranks"]) if job["running"] == job["ranks"] else f"{job['running']} of {job['ranks']}"
    if count := job.get("recoveries"):
        ranks += f" ({count} recover{'y' if count == 1 else 'ies'})"
    if spares := job.get("spares"):
        ranks += f" + {spares} spare"
    if servers := len(job.get("servers", ())):
        ranks += f" + {servers} server{'s' * (servers > 1)}"
    step = "-" if job["step"] is None else f"{job['step']}" + (f"/{job['steps']}" if job.get("steps") else "")
    loss = job.get("loss")
    told = f"{loss:.4g}" if isinstance(loss, float | int) else str(loss or "-")
    arguments = shlex.join(job.get("arguments", ())) or "-"
    since = format_elapsed(time.time() - job["started_s"])
    return str(job["pid"]), job["name"], ranks, since, step, told, _printable(arguments), job["directory"]


def _printable(text: str) -> str:
    return text if text.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in text)
