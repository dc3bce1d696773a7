"""The table of a drill, a row for each fault. Pure."""

from __future__ import annotations

from unisono.drill.injector import Resize, Strike
from unisono.text import clip, format_ranks

__all__ = ["heading", "table_row"]

_COLUMNS = (
    ("FAULT", 5, "<"),
    ("RANK", 4, ">"),
    ("PHASE", 10, "<"),
    ("STEP", 5, ">"),
    ("NOTICED", 7, ">"),
    ("SCRIPT", 6, ">"),
    ("NEXT STEP", 9, ">"),
    ("REPEATED", 8, ">"),
    ("ENDED BY", 24, "<"),
)


def heading(width: int) -> str:
    """Return the names of the columns, in at most `width` characters.

    >>> heading(80)
    'FAULT  RANK  PHASE        STEP  NOTICED  SCRIPT  NEXT STEP  REPEATED  ENDED BY'
    """
    return _line(tuple(name for name, _, _ in _COLUMNS), width)


def table_row(done: Strike | Resize, width: int) -> str:
    """Return the row of a fault, or of a change of the number of ranks, in at most `width` characters.

    >>> from unisono.drill.fault_plan import Fault
    >>> fault = Fault("kill", 2, 417, 0.5)
    >>> strike = Strike(fault, 417, 0.0, 0, (2,), "was killed by SIGKILL", "backward", 0.001, 0.21, 0.4, 1)
    >>> table_row(strike, 80)
    'kill      2  backward      418  0.001 s  0.21 s     0.40 s         1  SIGKILL'
    >>> table_row(Strike(Fault("term", 0, 3, 0.5), 3, 0.0, 0), 80)
    'term      0                  4        -       -          -         -  no effect'
    >>> from unisono.drill.fault_plan import Change
    >>> table_row(Resize(Change(4, 30), 31, 0.0, before=2, waited_s=0.04), 80)
    'scale                       32        -       -     0.04 s         -  2 -> 4'
    """
    return _line(_cells_of_change(done) if isinstance(done, Resize) else _cells_of_fault(done), width)


def _cells_of_fault(strike: Strike) -> tuple[str, ...]:
    ended = strike.ended.removeprefix("was killed by ").removeprefix("raised ") or "no effect"
    others = [rank for rank in strike.ranks if rank != strike.fault.rank]
    if others:
        ended += f", with {format_ranks(others)}"
    return (
        strike.fault.kind,
        str(strike.fault.rank),
        strike.phase,
        str(strike.step + 1),
        "-" if strike.noticed_s is None else f"{strike.noticed_s:.3f} s",
        "-" if strike.script_s is None else f"{strike.script_s:.2f} s",
        "-" if strike.resumed_s is None else f"{strike.resumed_s:.2f} s",
        "-" if strike.repeated is None else str(strike.repeated),
        ended,
    )


def _cells_of_change(resize: Resize) -> tuple[str, ...]:
    waited = "-" if resize.waited_s is None else f"{resize.waited_s:.2f} s"
    what = resize.problem or f"{resize.before} -> {resize.change.ranks}"
    return "scale", "", "", str(resize.step + 1), "-", "-", waited, "-", what


def _line(cells: tuple[str, ...], width: int) -> str:
    parts = [f"{cell:{side}{size}}" for cell, (_, size, side) in zip(cells, _COLUMNS, strict=True)]
    return clip("  ".join(parts).rstrip(), width)
