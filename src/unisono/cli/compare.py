"""`unisono compare`: how runs differ, and since which step."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from unisono.report.comparison import compare_runs
from unisono.report.comparison_page import render_comparison
from unisono.report.comparison_words import are_equal, figures_of_runs, hint, sentences
from unisono.report.output import write_page
from unisono.text import clip
from unisono.watch.figures import format_bytes

__all__ = ["compare"]

_WIDTH = 200
"""Columns where there is no terminal."""


@click.command(short_help="Compare runs: the first step that differs, and the settings.")
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, metavar="RUN RUN...")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Also write a page with the curves; - for stdout."
)
def compare(runs: Sequence[Path], output: Path | None) -> int:
    """Compare runs with the first one: the first step whose loss or weights differ, and the settings that do.

    Each RUN is the directory of a Trainer. Losses are compared by their bits, and weights where the runs record them
    with Trainer(digest_every=...).

    The exit code is 0 if all are equal as far as both have come, 1 if one is not, and 2 if they cannot be compared.

    \b
    unisono compare runs/a runs/b
    unisono compare runs/a runs/b runs/c -o compared.html
    """
    if len(runs) < 2:
        raise click.UsageError("compare takes two runs or more: the directories of Trainers, such as runs/a runs/b")
    comparison = compare_runs(runs)
    page = render_comparison(comparison) if output is not None else ""
    if str(output) == "-":
        click.echo(page, nl=False)
        return 0 if are_equal(comparison) else 1
    if output is not None:
        write_page(output, page)
    for sentence in [*sentences(comparison), *filter(None, [hint(comparison)])]:
        click.echo(sentence)
    settings = [
        (each["name"], ["-" if value is None else str(value) for value in each["values"]])
        for each in comparison["settings"]
    ]
    names = [str(run["title"]) for run in comparison["runs"]]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH
    for line in _table(names, [*figures_of_runs(comparison), *settings], width=width):
        click.echo(line)
    if output is not None:
        click.echo(f"{output} ({format_bytes(len(page.encode()))})")
    return 0 if are_equal(comparison) else 1


def _table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], *, width: int) -> list[str]:
    """Return the lines of a table with a column for each run, clipped to the width."""
    shown = [("", *names), *((_printable(name), *map(_printable, values)) for name, values in rows)]
    first = max(len(row[0]) for row in shown)
    most = max(8, (width - first) // len(names) - 2)
    cells = [(row[0], *(clip(value, most, at="middle") for value in row[1:])) for row in shown]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names) + 1)]
    return ["", *("  ".join(value.ljust(widths[i]) for i, value in enumerate(row)).rstrip() for row in cells)]


def _printable(value: str) -> str:
    return "".join(sign if sign.isprintable() else "?" for sign in value)
