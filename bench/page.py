"""docs/benchmarks.md, written by a run of all benchmarks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.catalogue import BENCHMARKS, Benchmark
from bench.rows import Row
from bench.tables import table

__all__ = ["Section", "page", "with_section"]

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

**Faults.** Those of `unisono drill` under torchrun and torchft: [fault-comparison.md](fault-comparison.md), which
`python -m bench faults --page` writes.

**Another machine.** Ratios to gloo depend on what loopback and a switch of threads cost:
[benchmarks-xeon.md](benchmarks-xeon.md) is this page from a machine where gloo takes two thirds as long, and was
written before the last changes. With 66 thousand parameters a training step is nearly all gloo, or nearly all Python
and torch's own calls. Four times DDP's speed is then within reach on one machine, and on another one less than a
process takes that trains alone; the section on `shared` has both.
"""

_MISSED = "**Goals missed**: "


class Section(NamedTuple):
    """What a benchmark came to."""

    benchmark: Benchmark
    rows: Sequence[Row]
    problem: str | None
    """Why it did not run to its end; None if it did."""


def page(sections: Sequence[Section], *, date: str, machine: str, load: str, versions: str) -> str:
    """Write the page."""
    introduction = _INTRODUCTION.format(date=date, machine=machine, load=load, versions=versions)
    parts = [f"{introduction}\n{_MISSED}none.\n", *map(_written, sections)]
    return _with_missed("\n".join(parts))


def with_section(text: str, section: Section, *, date: str, machine: str, load: str) -> str:
    """Put what a benchmark has come to into a page, in place of what it came to before, saying when and where."""
    name = section.benchmark.name
    new = f"{_written(section)}\nMeasured again on {date}, on {machine}; before the run: {load}.\n"
    old = re.compile(rf"^## {re.escape(name)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    parts = old.split(text)
    before, after = parts if len(parts) == 2 else _divided(text, name)
    return _with_missed(f"{before}{new}\n{after}".rstrip("\n") + "\n")


def _divided(text: str, name: str) -> tuple[str, str]:
    """Divide a page where the section of a new benchmark belongs."""
    names = [benchmark.name for benchmark in BENCHMARKS]
    for later in names[names.index(name) + 1 :]:
        before, heading, after = text.partition(f"\n## {later}\n")
        if heading:
            return before + "\n", heading[1:] + after
    return text + "\n", ""


def _written(section: Section) -> str:
    benchmark, rows, problem = section
    parts = [f"## {benchmark.name}\n\n{benchmark.notes.strip()}\n"]
    if rows:
        parts.append(table(rows) + "\n")
    if problem is not None:
        parts.append(f"It did not run to its end: {problem}\n")
    return "\n".join(parts)


def _with_missed(text: str) -> str:
    """List the goals that are missed at the top of a page, from its tables."""
    missed, name = [], ""
    for line in text.splitlines():
        if line.startswith("## "):
            name = line[3:]
        elif line.startswith("| ") and ": MISSED " in line:
            missed.append(f"{name}: {line.split(' | ')[0][2:].strip()}")
    shown = "; ".join(missed) or "none"
    return re.sub(rf"^{re.escape(_MISSED)}.*$", lambda _: f"{_MISSED}{shown}.", text, count=1, flags=re.MULTILINE)
