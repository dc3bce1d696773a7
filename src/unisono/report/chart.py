"""Curves as HTML with SVG inside, complete without JavaScript. Start reading at `render_chart`.

Lines and labels are apart: the SVG is stretched to the width of the screen, and labels are text beside it, which
stays as large as other text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from unisono.report.markup import text
from unisono.report.scales import Scale, format_tick, value_scale
from unisono.watch.figures import format_count, format_value

__all__ = ["Line", "render_chart", "smoothed", "smoothing_of"]

_WIDTH, _HEIGHT = 1000, 240


class Line(NamedTuple):
    """A curve in a chart."""

    name: str
    """The name of its run; empty if there is one run."""
    curve: Mapping[str, Any]
    color: int = 0
    """The number of its run, which decides the color."""


def smoothing_of(buckets: int) -> float:
    """Return how much a curve is smoothed at first, 0 to 1: short ones are not."""
    return 0.0 if buckets < 60 else 0.9


def smoothed(values: Sequence[float], part: float, *, is_log: bool = False) -> list[float]:
    """Return an exponential moving average of values, without a bias to the first one.

    Args:
        values: The values.
        part: What stays of the average at each value, 0 to 1.
        is_log: True to smooth them as they are seen on a logarithmic scale: otherwise the greatest would be all of it.

    >>> smoothed([1.0, 3.0, 3.0], 0.5)
    [1.0, 2.3333333333333335, 2.7142857142857144]
    >>> [round(value, 6) for value in smoothed([1.0, 1e-3], 0.5, is_log=True)]
    [1.0, 0.01]
    """
    if is_log and min(values) > 0:
        return [math.exp(value) for value in smoothed([math.log(value) for value in values], part)]
    found, average, weight = [], 0.0, 0.0
    for value in values:
        average = part * average + (1 - part) * value
        weight = part * weight + 1 - part
        found.append(average / weight)
    return found


def render_chart(
    title: str, lines: Sequence[Line], *, key: str, note: str = "", smooth: bool = True, now: str = ""
) -> str:
    """Return a chart.

    Args:
        title: Its heading.
        lines: The curves, each with at least one point.
        key: The name of the curves in the data of the page, for JavaScript.
        note: A remark beside the heading.
        smooth: True to smooth long curves, of values that are noisy.
        now: The latest value, beside the heading.
    """
    curves = [line.curve for line in lines]
    first, last = min(curve["x"][0] for curve in curves), max(curve["x"][-1] for curve in curves)
    xs = Scale(float(first), float(last), False)
    ys = value_scale(
        [value for curve in curves for value in curve["low"]], [value for curve in curves for value in curve["high"]]
    )
    drawn = "".join(_line(line, xs, ys, smooth=smooth) for line in lines)
    grid = "".join(f'<path d="M0 {_y(ys, y)}H{_WIDTH}"/>' for y in ys.ticks())
    labels = "".join(
        f'<span style="top:{100 * (1 - ys.at(y)):.2f}%">{format_tick(y, ys.step())}</span>' for y in ys.ticks()
    )
    below = "".join(
        f'<span style="left:{100 * xs.at(x):.2f}%">{format_tick(x, xs.step())}</span>'
        for x in xs.ticks()
        if x == int(x)
    )
    remark = " · ".join(filter(None, (note, "log scale" if ys.is_log else "")))
    return (
        f'<figure class="chart{"" if smooth else " plain"}" data-key="{text(json.dumps(key))}">'
        f"<figcaption><h3>{text(title)}</h3>"
        f'<output>{text(now)}</output><span class="remark">{text(remark)}</span></figcaption>'
        f'<div class="plot"><div class="y">{labels}</div><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none" role="img" aria-label="{text(_spoken(title, lines))}">'
        f'<g class="grid">{grid}</g><g class="lines">{drawn}</g></svg><div class="x">{below}</div></div></figure>'
    )


def _spoken(title: str, lines: Sequence[Line]) -> str:
    """Return what a chart shows, for those who cannot see it."""
    told = []
    for name, curve, _ in lines:
        of = f"{name}: " if name else ""
        ends = f"{format_value(curve['mean'][0])} to {format_value(curve['mean'][-1])}"
        told.append(f"{of}{ends} from step {format_count(curve['x'][0])} to {format_count(curve['x'][-1])}")
    return f"{title}, {'; '.join(told)}"


def _line(line: Line, xs: Scale, ys: Scale, *, smooth: bool) -> str:
    curve = line.curve
    across = [_x(xs, x) for x in curve["x"]]
    part = smoothing_of(len(across)) if smooth else 0.0
    parts = []
    if curve["low"] != curve["high"]:
        above = " ".join(f"{x} {_y(ys, y)}" for x, y in zip(across, curve["high"], strict=True))
        below = " ".join(f"{x} {_y(ys, y)}" for x, y in zip(reversed(across), reversed(curve["low"]), strict=True))
        parts.append(f'<path class="band" d="M{above} {below}Z"/>')
    if part:
        parts.append(f'<path class="raw" d="{_path(across, curve["mean"], ys)}"/>')
    dot = " dot" if len(across) == 1 else ""
    parts.append(f'<path class="mean{dot}" d="{_path(across, smoothed(curve["mean"], part, is_log=ys.is_log), ys)}"/>')
    return f'<g class="line c{line.color % 6}">{"".join(parts)}</g>'


def _path(across: Sequence[str], values: Sequence[float], ys: Scale) -> str:
    points = [f"{x} {_y(ys, y)}" for x, y in zip(across, values, strict=True)]
    # A single point is a line of no length, whose round ends are a dot.
    return f"M{points[0]}h0" if len(points) == 1 else "M" + " ".join(points)


def _x(xs: Scale, value: float) -> str:
    return f"{_WIDTH * xs.at(value):.4g}"


def _y(ys: Scale, value: float) -> str:
    return f"{_HEIGHT * (1 - ys.at(value)):.4g}"
