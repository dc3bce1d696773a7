"""The chart of latency and bandwidth against size in docs/shm.md, drawn as SVG from rows of the collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from bench.rows import Row

__all__ = ["draw"]

_WIDTH, _HEIGHT = 900, 400
_TOP, _BOTTOM = 80, 316
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; text-anchor: middle }
.big { font-size: 16px; font-weight: 600 } .small { font-size: 11.5px } .right { text-anchor: end }
.left { text-anchor: start } .soft { fill: #59636e } .card { fill: #fff; stroke: #d1d9e0 }
path { stroke-width: 2.25; fill: none; stroke-linejoin: round } path.grid { stroke: #e3e8ed; stroke-width: 1 }
.shm { stroke: #0068b8 } .gloo { stroke: #b4480c } .memcpy { stroke: #59636e; stroke-dasharray: 5 4 }
circle { stroke: none } circle.shm, text.shm { fill: #0068b8 } circle.gloo, text.gloo { fill: #b4480c }
circle.memcpy, text.memcpy { fill: #59636e } text.shm, text.gloo, text.memcpy { stroke: none; font-weight: 600 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .soft { fill: #9da7b1 } .card { fill: #0d1117; stroke: #3d444d } path.grid { stroke: #2a3139 }
.shm { stroke: #4aa3e8 } .gloo { stroke: #e07a3c } .memcpy { stroke: #9da7b1 }
circle.shm, text.shm { fill: #4aa3e8 } circle.gloo, text.gloo { fill: #e07a3c }
circle.memcpy, text.memcpy { fill: #9da7b1 } }
"""

Curve = list[tuple[float, float]]


class _Axis(NamedTuple):
    """A logarithmic axis: which values lie between which pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def decades(self) -> list[float]:
        return [10.0**n for n in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]


def draw(rows: Sequence[Row]) -> str:
    """Draw all_reduce on 2 ranks over shm and gloo, and memcpy: milliseconds on the left, gigabytes a second right.

    Args: rows hold all_reduce at several sizes, against gloo and against memcpy.
    """
    curves: dict[str, Curve] = {"gloo": [], "memcpy": [], "shm": []}
    for row in rows:
        if row.parameters.get("operation") == "all_reduce" and row.parameters["ranks"] == 2:
            nbytes = float(row.parameters["nbytes"])
            if row.peer_name == "gloo":
                curves["shm"].append((nbytes, row.ours.median))
                curves["gloo"].append((nbytes, row.peer.median))
            else:
                curves["memcpy"].append((nbytes, row.peer.median))
    rates = {name: [(n, n / ms / 1e6) for n, ms in curve] for name, curve in curves.items()}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-labelledby="t d">',
        '<title id="t">all_reduce on 2 ranks: time and bandwidth against size</title>',
        f'<desc id="d">{_in_words(curves)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="10"/>',
        *_panel(curves, left=70, right=430, title="Time of an all_reduce", unit="ms"),
        *_panel(rates, left=510, right=870, title="Bandwidth", unit="GB/s"),
        *_legend(list(curves), y=_HEIGHT - 16),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(curves: dict[str, Curve], *, left: int, right: int, title: str, unit: str) -> list[str]:
    points = [point for curve in curves.values() for point in curve]
    sizes, values = [n for n, _ in points], [v for _, v in points]
    x = _Axis(min(sizes), max(sizes), left, right)
    y = _Axis(10 ** math.floor(math.log10(min(values))), 10 ** math.ceil(math.log10(max(values))), _BOTTOM, _TOP)
    middle = (left + right) / 2
    parts = [
        f'<text class="big" x="{middle}" y="40">{title}</text>',
        f'<text class="small soft right" x="{left - 8}" y="{_TOP - 18}">{unit}</text>',
    ]
    for value in y.decades():
        parts.append(f'<path class="grid" d="M{left} {y.at(value)}H{right}"/>')
        parts.append(f'<text class="small soft right" x="{left - 8}" y="{y.at(value) + 4}">{value:g}</text>')
    for value in x.decades():
        parts.append(f'<path class="grid" d="M{x.at(value)} {_TOP}V{_BOTTOM}"/>')
        parts.append(f'<text class="small soft" x="{x.at(value)}" y="{_BOTTOM + 20}">{_size(value)}</text>')
    for name, curve in curves.items():
        dots = [(x.at(n), y.at(v)) for n, v in sorted(curve)]
        parts.append(f'<path class="{name}" d="M{"L".join(f"{a} {b}" for a, b in dots)}"/>')
        parts += [f'<circle class="{name}" cx="{a}" cy="{b}" r="3"/>' for a, b in dots]
    return parts


def _legend(names: Sequence[str], *, y: int) -> list[str]:
    parts, x = [], _WIDTH // 2 - 60 * len(names)
    for name in reversed(names):
        parts.append(
            f'<path class="{name}" d="M{x} {y - 4}h28"/><circle class="{name}" cx="{x + 14}" cy="{y - 4}" r="3"/>'
        )
        parts.append(f'<text class="{name} left" x="{x + 36}" y="{y}">{name}</text>')
        x += 120
    return parts


def _in_words(curves: dict[str, Curve]) -> str:
    ends = [f"{name} takes {min(c)[1]:.3g} ms for {_size(min(c)[0])} and {max(c)[1]:.3g} ms for {_size(max(c)[0])}"
            for name, c in curves.items()]  # fmt: skip
    return f"Two panels with logarithmic axes. {'; '.join(ends)}."


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e3:g} KB" if nbytes < 1e6 else f"{nbytes / 1e6:g} MB"
