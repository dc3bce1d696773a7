"""Where the time of steps has gone on each rank, from the events "times". Start reading at `RankTimes.add`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TypeGuard

__all__ = ["PARTS", "RankTimes"]

PARTS = ("data", "compute", "waiting", "update")
"""The parts of a step that ranks measure."""


class RankTimes:
    """Sums over the events of a run, in bounded memory. A measured step counts for those beside it that were not.

    Args:
        most: The greatest number of intervals on the timeline; with more, each two neighbours become one.
    """

    def __init__(self, most: int = 240) -> None:
        self._most = most
        self._mean_s = dict.fromkeys(PARTS, 0.0)
        self._by_rank: dict[str, list[float]] = {}
        self._covered = self._covered_by_rank = self._seconds = 0.0
        self._at_s: float | None = None
        self._intervals: list[tuple[float, float, list[float]]] = []

    def break_off(self) -> None:
        """Note that the next event is not about the time since the last one: ranks have changed, or begun anew."""
        self._at_s = None

    def add(self, event: Mapping[str, Any], at_s: float) -> None:
        """Add an event. One with other fields or types is passed over.

        Args:
            event: The event.
            at_s: When it was written, in seconds since the start.
        """
        steps, of_steps, seconds = (event.get(name) for name in ("steps", "of_steps", "seconds"))
        parts = {name: each for name in PARTS if (each := _seconds(event.get(name))) is not None}
        size = len(parts.get("compute", ()))
        if not (_is_positive(steps) and _is_positive(of_steps) and _is_positive(seconds)) or not size:
            return
        if any(len(each) != size for each in parts.values()):
            return
        factor = of_steps / steps
        if self._by_rank.keys() != parts.keys() or size != len(self._by_rank["compute"]):
            self._by_rank, self._covered_by_rank = {name: [0.0] * size for name in parts}, 0.0
            self._seconds = 0.0
        for name, of_ranks in parts.items():
            self._mean_s[name] += factor * sum(of_ranks) / size
            self._by_rank[name] = [a + factor * b for a, b in zip(self._by_rank[name], of_ranks, strict=True)]
        self._covered += of_steps
        self._covered_by_rank += of_steps
        self._seconds += factor * seconds
        start_s = self._at_s if self._at_s is not None else at_s - seconds
        self._at_s = at_s
        if "waiting" in parts and at_s > start_s:
            waited = [min(1.0, each / seconds) * (at_s - start_s) for each in parts["waiting"]]
            self._intervals.append((max(0.0, start_s), at_s, waited))
            if len(self._intervals) > self._most:
                self._intervals = _halved(self._intervals)

    def document(self) -> dict[str, Any] | None:
        """Return the sums, in seconds, and the number of steps that they stand for; None without an event.

        "mean": over ranks, by part; "ranks": of each rank, by part, in "steps_of_ranks" steps, which took
        "seconds_of_ranks", since their number last changed.
        """
        if not self._covered:
            return None
        return {
            "steps": self._covered,
            "mean": {name: round(self._mean_s[name], 6) for name in self._by_rank},
            "ranks": {name: [round(each, 6) for each in of_ranks] for name, of_ranks in self._by_rank.items()},
            "steps_of_ranks": self._covered_by_rank,
            "seconds_of_ranks": round(self._seconds, 6),
        }

    def waits(self) -> list[list[Any]]:
        """Return [start, end, part of the time that each rank waited] of each interval, in seconds."""
        return [
            [round(start, 3), round(end, 3), [round(each / (end - start), 3) for each in waited]]
            for start, end, waited in self._intervals
        ]


def _halved(intervals: list[tuple[float, float, list[float]]]) -> list[tuple[float, float, list[float]]]:
    """Draw neighbours together that follow on each other and have the same ranks; those that do not stay.

    >>> _halved([(0.0, 1.0, [0.5]), (1.0, 3.0, [1.0]), (4.0, 5.0, [0.0])])
    [(0.0, 3.0, [1.5]), (4.0, 5.0, [0.0])]
    """
    found: list[tuple[float, float, list[float]]] = []
    is_whole = False  # the last one is of two already
    for start, end, waited in intervals:
        last = found[-1] if found else None
        if last is not None and not is_whole and last[1] == start and len(last[2]) == len(waited):
            found[-1] = last[0], end, [a + b for a, b in zip(last[2], waited, strict=True)]
            is_whole = True
        else:
            found.append((start, end, waited))
            is_whole = False
    # A run whose ranks change all the time has none to draw together: the first ones go.
    return found if len(found) < len(intervals) else found[len(found) // 2 :]


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _seconds(value: Any) -> list[float] | None:
    if not isinstance(value, list) or not value:
        return None
    return value if all(each == 0 or _is_positive(each) for each in value) else None
