"""How two sides are measured against each other: in turn, in one run, in random order, after a warm-up.

A machine drifts (clock, heat, neighbours), by more than most differences of interest. Measured in turn, both sides get
the same drift. The garbage collector stays on: a side that makes garbage should pay for it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Effort", "Pairs", "alternate", "timed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much work a benchmark may put into its figures."""

    quick: bool = False
    """Only see that everything works: small cases, a few rounds, figures without meaning."""

    def rounds(self, full: int) -> int:
        """Give the number of pairs to measure."""
        return 3 if self.quick else full


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
    """Measure two sides in turn, and which one begins a pair is drawn from the seed.

    With several ranks every rank must call it, with the same numbers: the order is then the same on all.
    Args: each side does what is to be measured once and returns the seconds that count, so that it can prepare and tidy
        up off the clock; `timed` makes a side of a plain function. warmup pairs are done first and forgotten.
    """
    coin = random.Random(seed)
    pairs = Pairs([], [])
    for i in range(-warmup, rounds):
        seconds = {side: side() for side in ((ours, peer) if coin.random() < 0.5 else (peer, ours))}
        if i >= 0:
            pairs.ours.append(seconds[ours])
            pairs.peer.append(seconds[peer])
    return pairs


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """Make a side of a function whose every second counts."""

    def side() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return side
