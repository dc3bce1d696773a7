"""How two sides are measured against each other: in turn, in one run, in random order, after a warm-up.

A machine drifts (clock, heat, neighbours), by more than most differences of interest. Measured in turn, both sides get
the same drift. The garbage collector stays on: a side that makes garbage should pay for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Effort", "Pairs", "alternate", "in_turn", "timed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much work a benchmark may put into its figures."""

    quick: bool = False
    """Only see that everything works: small cases, a few rounds, figures without meaning."""

    repeats: int | None = None
    """Measurements of each case, if not as many as the benchmark thinks right."""
    seed: int = 0
    """Draws random moments and ranks."""

    def rounds(self, full: int, quick: int = 3) -> int:
        """Give the number of pairs to measure."""
        return self.repeats or (quick if self.quick else full)


class Pairs(NamedTuple):
    """Measurements of both sides, in pairs."""

    ours: list[float]
    peer: list[float]

    def scaled(self, factor: float) -> Pairs:
        """Convert seconds to another unit of time."""
        return Pairs([factor * s for s in self.ours], [factor * s for s in self.peer])

    def as_rates(self, *, ours: float, peer: float) -> Pairs:
        """Convert seconds to things per second, given the things done in one measurement of each side."""
        return Pairs([ours / s for s in self.ours], [peer / s for s in self.peer])


def alternate(
    ours: Callable[[], float], peer: Callable[[], float], *, rounds: int, warmup: int = 2, seed: int = 0
) -> Pairs:
    """Measure two sides in turn; see `in_turn`."""
    return Pairs(*in_turn([ours, peer], rounds=rounds, warmup=warmup, seed=seed))


def in_turn(sides: Sequence[Callable[[], float]], *, rounds: int, warmup: int = 2, seed: int = 0) -> list[list[float]]:
    """Measure sides in turn, and the order of each round is drawn from the seed.

    With several ranks every rank must call it, with the same numbers: the order is then the same on all.
    Args: each side does what is to be measured once and returns the seconds that count, so that it can prepare and tidy
        up off the clock; `timed` makes a side of a plain function. warmup rounds are done first and forgotten.
    """
    rng = random.Random(seed)
    found: list[list[float]] = [[] for _ in sides]
    for i in range(-warmup, rounds):
        for side in rng.sample(range(len(sides)), len(sides)):
            seconds = sides[side]()
            if i >= 0:
                found[side].append(seconds)
    return found


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """Make a side of a function whose every second counts."""

    def side() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return side
