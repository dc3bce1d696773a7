"""docs/benchmarks.md, written by a run of all benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bench.catalogue import Benchmark
from bench.rows import Row
from bench.tables import table

__all__ = ["Section", "page"]

_INTRODUCTION = """\
# Benchmarks

Written by `make bench` (`python -m bench --all`) on {date}; do not edit.

- Machine: {machine}; before the run: {load}.
- Versions: {versions}.

**How to read it.** Ours and its peer were measured in turn, in one run, in random order, after a warm-up. Figures are
medians ± half the interquartile range of n measurements. The ratio is the peer's time over ours (or our rate over the
peer's), so above 1 means that ours is faster; its ± is half the interquartile range of the ratios of single pairs.
A row without a goal is for information. A goal is "even" if the ratio misses it by less than twice the standard error
of the median, so that another run may as well meet it. Ratios carry over to other machines better than times do.

**How to reproduce it.** `python -m bench --list` names the benchmarks, `python -m bench NAME` runs one of them. Use a
quiet machine: a busy neighbour costs the side that uses more processes more.
"""


class Section(NamedTuple):
    """What a benchmark came to."""

    benchmark: Benchmark
    rows: Sequence[Row]
    problem: str | None
    """Why it did not run to its end; None if it did."""


def page(sections: Sequence[Section], *, date: str, machine: str, load: str, versions: str) -> str:
    """Write the page."""
    missed = [
        f"{row.bench}: {row.case}" for section in sections for row in section.rows if row.met is False and not row.even
    ]
    parts = [_INTRODUCTION.format(date=date, machine=machine, load=load, versions=versions)]
    parts.append(f"**Goals missed**: {'; '.join(missed) if missed else 'none'}.\n")
    for benchmark, rows, problem in sections:
        parts.append(f"## {benchmark.name}\n\n{benchmark.notes.strip()}\n")
        if rows:
            parts.append(table(rows) + "\n")
        if problem is not None:
            parts.append(f"It did not run to its end: {problem}\n")
    return "\n".join(parts)
