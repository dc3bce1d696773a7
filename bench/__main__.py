"""The command line: python -m bench --list | NAME [--quick] [--json FILE] [--page] | --all | faults."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import date
from json import dumps
from pathlib import Path

from bench.catalogue import BENCHMARKS, Benchmark
from bench.errors import CannotRun
from bench.fault_page import fault_page, fault_tables
from bench.faults import FaultOutcome, outcomes
from bench.machine import describe_machine, describe_versions, load
from bench.measure import Effort
from bench.page import Section, page, with_section
from bench.rows import Row, row_from_json, row_to_json
from bench.tables import table

_DOCS = Path(__file__).parent.parent / "docs"
_PAGE, _FAULT_PAGE = _DOCS / "benchmarks.md", _DOCS / "fault-comparison.md"
_FAULTS = "faults"


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; a goal that is missed is shown and is no failure."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="unisono beside what people use today")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="name the benchmarks")
    what.add_argument("--all", action="store_true", help="run all of them, and rewrite docs/benchmarks.md")
    what.add_argument(
        "name", nargs="?", choices=[*(b.name for b in BENCHMARKS), _FAULTS], metavar="NAME", help="run this one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the JSON lines here, not to the terminal")
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds: see that it works")
    parser.add_argument("--page", action="store_true", help="put the result of NAME into its page in docs/")
    parser.add_argument("--repeats", type=int, metavar="N", help="measure so often, not as often as seems right")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="draws random moments and ranks")
    options = parser.parse_args(arguments)
    if options.page and (options.name is None or options.quick):
        parser.error("--page goes with a NAME, and without --quick")
    effort = Effort(quick=options.quick, repeats=options.repeats, seed=options.seed)
    if options.list:
        width = max(len(b.name) for b in BENCHMARKS)
        print("\n".join(f"{b.name:{width}}  {b.line}" for b in BENCHMARKS))
        print(f"{_FAULTS:{width}}  the faults of `unisono drill` under torchrun and torchft: a page of its own")
        return 0
    if options.all:
        return _run_all(effort, options.json)
    try:
        if options.name == _FAULTS:
            return _run_faults(effort, options.json, onto_page=options.page)
        benchmark = next(b for b in BENCHMARKS if b.name == options.name)
        return _run_one(benchmark, effort, options.json, onto_page=options.page)
    except CannotRun as reason:
        print(reason, file=sys.stderr)
        return 1


def _run_one(benchmark: Benchmark, effort: Effort, json: Path | None, *, onto_page: bool) -> int:
    before = load()
    print(f"{benchmark.name}: {benchmark.line}; {before}", file=sys.stderr)
    rows: list[Row] = []
    try:
        for row in benchmark.run(effort):
            rows.append(row)
            print(f"  {row.case}: {row.ratio:.3g} times {row.peer_name}", file=sys.stderr, flush=True)
    finally:
        # What was measured before something failed is worth as much as ever.
        lines = "".join(row_to_json(row) + "\n" for row in rows)
        if rows:
            print(table(rows))
        if json is None:
            print(lines, end="")
        else:
            json.write_text(lines, encoding="utf-8")
    if onto_page:
        section = Section(benchmark, rows, None)
        text = with_section(
            _PAGE.read_text(encoding="utf-8"),
            section,
            date=date.today().isoformat(),
            machine=describe_machine(),
            load=before,
        )
        _PAGE.write_text(text, encoding="utf-8")
    return 0


def _run_faults(effort: Effort, json: Path | None, *, onto_page: bool) -> int:
    before = load()
    print(f"{_FAULTS}: {before}", file=sys.stderr)
    found: list[FaultOutcome] = []
    try:
        for outcome in outcomes(effort):
            found.append(outcome)
            print(f"  {outcome.fault} under {outcome.system}: {_seconds(outcome)}", file=sys.stderr, flush=True)
    finally:
        if found:
            print(fault_tables(found))
        if json is not None:
            json.write_text("".join(f"{dumps(asdict(outcome))}\n" for outcome in found), encoding="utf-8")
    if onto_page:  # not of a run that was cut short, whose page would look whole
        text = fault_page(
            found,
            date=date.today().isoformat(),
            machine=describe_machine(),
            load=before,
            versions=describe_versions(),
        )
        _FAULT_PAGE.write_text(text, encoding="utf-8")
    return 0


def _seconds(outcome: FaultOutcome) -> str:
    return "no new step" if outcome.seconds is None else f"{outcome.seconds:.2f} s to the next new step"


def _run_all(effort: Effort, json: Path | None) -> int:
    """Run each benchmark in a process of its own, so that none inherits memory or threads of another."""
    before = load()
    sections = []
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in BENCHMARKS:
            out = Path(folder, benchmark.name)
            command = [sys.executable, "-m", "bench", benchmark.name, "--json", str(out)]
            command += ["--seed", str(effort.seed), *(["--quick"] if effort.quick else [])]
            command += ["--repeats", str(effort.repeats)] if effort.repeats is not None else []
            ended = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
            lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
            problem = None
            if ended.returncode:
                problem = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
                print(ended.stderr, file=sys.stderr)
            sections.append(Section(benchmark, [row_from_json(line) for line in lines], problem))
    if json is not None:
        rows = [row for section in sections for row in section.rows]
        json.write_text("".join(row_to_json(row) + "\n" for row in rows), encoding="utf-8")
    if not effort.quick:
        text = page(
            sections,
            date=date.today().isoformat(),
            machine=describe_machine(),
            load=before,
            versions=describe_versions(),
        )
        _PAGE.write_text(text, encoding="utf-8")
    return 1 if any(section.problem for section in sections) else 0


if __name__ == "__main__":
    sys.exit(main())
