"""One result of a benchmark: ours beside a named peer, the ratio, and the goal that it met or missed.

Every row has the same fields, so that a later reader can compare rows of different days without knowing the benchmark.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["Figure", "Goal", "Row", "row_from_json", "row_to_json", "summarise"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured quantity."""

    median: float
    """In the row's unit."""
    spread: float
    """Half the interquartile range, in the row's unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """A bound that a row should keep."""

    of: Literal["ratio", "ours"]
    """What is bounded: the ratio, from below; or our own figure, from above if it is a time, from below if a rate."""
    bound: float
    """In the row's unit, or a ratio."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of a benchmark's table."""

    bench: str
    """Name of the benchmark."""
    case: str
    """What was measured, for people."""
    peer_name: str
    """What ours is compared with, for people."""
    unit: str
    """Of both figures: a time such as "ms", or a rate, which has a "/" in it."""
    ours: Figure
    peer: Figure
    ratio_spread: float
    """Half the interquartile range of the ratios of single pairs: how far the ratio can be trusted."""
    n: int
    """Pairs of measurements."""
    goal: Goal | None = None
    """None: for information."""
    parameters: Mapping[str, int | str] = field(default_factory=dict)
    """The numbers of the case, for programs."""

    @property
    def is_rate(self) -> bool:
        """Whether more is better."""
        return "/" in self.unit

    @property
    def ratio(self) -> float:
        """The peer's time over ours (or our rate over the peer's), of the medians: above 1, ours is faster."""
        return self.ours.median / self.peer.median if self.is_rate else self.peer.median / self.ours.median

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        if self.goal.of == "ratio":
            return self.ratio >= self.goal.bound
        return self.ours.median >= self.goal.bound if self.is_rate else self.ours.median <= self.goal.bound

    @property
    def even(self) -> bool:
        """Whether the goal of a ratio is missed by less than the measurement can tell.

        That is twice the standard error of a median, 1.25 σ/√n for normal errors, with σ from the interquartile range.
        """
        if self.goal is None or self.goal.of != "ratio" or self.met:
            return False
        error = 1.2533 * self.ratio_spread / 0.6745 / math.sqrt(self.n)
        return self.goal.bound - self.ratio <= 2 * error


def summarise(
    bench: str,
    case: str,
    *,
    ours: Sequence[float],
    peer: Sequence[float],
    peer_name: str,
    unit: str,
    goal: Goal | None = None,
    **parameters: int | str,
) -> Row:
    """Make a row of values, in the row's unit, that were measured in pairs.

    >>> summarise("b", "c", ours=[1.0, 2.0, 3.0], peer=[4.0, 4.0, 4.0], peer_name="p", unit="ms").ratio
    2.0
    """
    rate = "/" in unit
    ratios = [a / b if rate else b / a for a, b in zip(ours, peer, strict=True)]
    return Row(
        bench=bench,
        case=case,
        peer_name=peer_name,
        unit=unit,
        ours=_figure(ours),
        peer=_figure(peer),
        ratio_spread=_figure(ratios).spread,
        n=len(ours),
        goal=goal,
        parameters=parameters,
    )


def _figure(values: Sequence[float]) -> Figure:
    if len(values) < 2:
        return Figure(_rounded(values[0]), 0.0)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(_rounded(median), _rounded((high - low) / 2))


def _rounded(value: float) -> float:
    """Drop digits that mean nothing, so that JSON lines can be read."""
    return float(f"{value:.6g}")


def row_to_json(row: Row) -> str:
    """Write a row as one line."""
    return json.dumps({**asdict(row), "ratio": _rounded(row.ratio), "met": row.met}, ensure_ascii=False)


def row_from_json(line: str) -> Row:
    """Read what `row_to_json` wrote."""
    fields: dict[str, Any] = json.loads(line)
    del fields["ratio"], fields["met"]
    goal = fields.pop("goal")
    ours, peer = Figure(**fields.pop("ours")), Figure(**fields.pop("peer"))
    return Row(**fields, ours=ours, peer=peer, goal=None if goal is None else Goal(**goal))
