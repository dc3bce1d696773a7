"""Rows as a Markdown table that is also readable on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from bench.rows import Figure, Row

__all__ = ["table"]

_HEADER = ("case", "peer", "peer's figure", "ours", "unit", "ratio", "goal", "n")
_NUMBERS = range(2, 4)


def table(rows: Sequence[Row]) -> str:
    """Lay rows out as a table with aligned columns."""
    cells = [_HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(_HEADER))]
    rule = ["-" * (w - 1) + ":" if i in _NUMBERS else "-" * w for i, w in enumerate(widths)]
    return "\n".join(_line(line, widths) for line in (cells[0], rule, *cells[1:]))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [c.rjust(w) if i in _NUMBERS else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return f"| {' | '.join(padded)} |"


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.case,
        row.peer_name,
        _shown(row.peer),
        _shown(row.ours),
        row.unit,
        f"{row.ratio:.3g} ±{row.ratio_spread:.2g}",
        _goal(row),
        str(row.n),
    )


def _shown(figure: Figure) -> str:
    """Show a figure with three digits or more, and its spread with the same number of decimals.

    >>> _shown(Figure(0.012345, 0.0004)), _shown(Figure(12345.6, 78.9))
    ('0.0123 ±0.0004', '12346 ±79')
    """
    decimals, magnitude = 0, abs(figure.median)
    while 0 < magnitude < 100 and decimals < 6:
        magnitude, decimals = magnitude * 10, decimals + 1
    return f"{figure.median:.{decimals}f} ±{figure.spread:.{decimals}f}"


def _goal(row: Row) -> str:
    if row.goal is None:
        return "–"
    sign = "≥" if row.goal.of == "ratio" or row.is_rate else "≤"
    what = "ratio" if row.goal.of == "ratio" else "ours"
    return f"{what} {sign} {row.goal.bound:g}: {'met' if row.met else 'even' if row.even else 'MISSED'}"
