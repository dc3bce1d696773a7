"""docs/fault-comparison.md, which `python -m bench faults --page` writes from templates/fault-comparison.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.faults import BATCH, CHECKPOINT_EVERY, HANG_S, PATIENCE_S, RANKS, STEPS, FaultOutcome
from unisono.drill.fault_plan import KINDS

__all__ = ["fault_page", "fault_tables"]

_TEMPLATE = Path(__file__).parent / "templates" / "fault-comparison.md"
_MISSING = "torchft was not installed when this page was written, so its rows are missing.\n\n"
_HEADER = ("system", "noticed", "came back", "next new step", "repeated", "dropped", "ranks", "same bits")


def fault_page(outcomes: Sequence[FaultOutcome], *, date: str, machine: str, load: str, versions: str) -> str:
    """Write the page."""
    times = max(len(_of(outcomes, each.system, each.fault)) for each in outcomes)
    return _TEMPLATE.read_text(encoding="utf-8").format(
        date=date,
        machine=machine,
        load=load,
        versions=versions,
        ranks=RANKS,
        batch=BATCH,
        steps=STEPS,
        every=CHECKPOINT_EVERY,
        hang=HANG_S,
        patience=PATIENCE_S,
        repeats="once each" if times == 1 else f"{times} times each",
        tables=fault_tables(outcomes),
        missing="" if any(each.system == "torchft" for each in outcomes) else _MISSING,
    )


def fault_tables(outcomes: Sequence[FaultOutcome]) -> str:
    """Show what became of each fault, in a table with a line for each system."""
    present = list(dict.fromkeys(each.system for each in sorted(outcomes, key=lambda each: each.system, reverse=True)))
    parts = []
    for kind in KINDS.values():
        lines = [_line(system, found) for system in present if (found := _of(outcomes, system, kind.name))]
        if lines:
            table = "\n".join([_row(_HEADER), _row(["---"] * len(_HEADER)), *lines])
            parts.append(f"### {kind.name}\n{kind.what}.\n\n{table}\n")
    return "\n".join(parts)


def _of(outcomes: Sequence[FaultOutcome], system: str, fault: str) -> list[FaultOutcome]:
    return [each for each in outcomes if (each.system, each.fault) == (system, fault)]


def _line(system: str, found: Sequence[FaultOutcome]) -> str:
    back = [each for each in found if each.seconds is not None]
    return _row(
        [
            system,
            _share(found, lambda each: each.seconds is not None or each.replaced or each.exit_code is not None),
            _share(found, lambda each: each.seconds is not None),
            f"{statistics.median(each.seconds for each in back if each.seconds is not None):.2f} s"
            if back
            else _why_none(found),
            _median([each.repeated for each in back]),
            _median([each.dropped for each in back]),
            _median([each.ranks for each in found]),
            _share(back, lambda each: each.same),
        ]
    )


def _why_none(found: Sequence[FaultOutcome]) -> str:
    codes = sorted({each.exit_code for each in found if each.exit_code is not None})
    if codes:
        return f"none: it ended with exit code {', '.join(map(str, codes))}"
    return f"nothing within {PATIENCE_S:g} s"


def _share(found: Sequence[FaultOutcome], holds: Callable[[FaultOutcome], bool]) -> str:
    """Say in how many cases something holds: yes, no, or a part of them."""
    count = sum(map(holds, found))
    if not found:
        return "–"
    return "yes" if count == len(found) else "no" if not count else f"{count} of {len(found)}"


def _median(values: Sequence[int]) -> str:
    return f"{statistics.median(values):g}" if values else "–"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
