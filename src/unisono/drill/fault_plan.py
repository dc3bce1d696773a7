"""The faults of a drill, drawn from a seed. Pure; start reading at `draw_faults`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["KINDS", "Change", "Fault", "FaultKind", "draw_plan"]


class FaultKind(NamedTuple):
    """A kind of faults."""

    name: str
    """As the user writes it."""
    what: str
    """Its effect on the rank, in words."""


KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("kill", "SIGKILL, as from a lack of memory or an operator"),
        FaultKind("stop", "SIGSTOP: it hangs, until --stuck-timeout ends it"),
        FaultKind("term", "SIGTERM: it may save, and ends"),
        FaultKind("segv", "SIGSEGV, as from a mistake in native code"),
        FaultKind("oom", "no more memory: its next allocation fails, or else it is killed two steps later"),
    )
}
"""The kinds of faults by name."""

_LEAST_APART = 2
"""Steps between two faults: a rank may lag one step behind, and several deaths at one step end a job."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a rank at a moment."""

    kind: str
    rank: int
    step: int
    """The steps that have been done by then."""
    fraction: float
    """The part of the time of a step that passes after that."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the number of ranks."""

    ranks: int
    step: int
    """The steps that have been done when it is asked for."""


def draw_plan(
    kinds: Sequence[str], *, ranks: int, steps: int, every: int, seed: int, sizes: Sequence[int] = ()
) -> list[Fault | Change]:
    """Draw a fault in each window of `every` steps, and spread changes of the number of ranks over the run.

    Each kind comes once, in random order, before one comes again. There is no fault in the first step, as ranks may not
    have reached it all, nor in the last one, as nobody is replaced any more once a rank has finished; nor while there
    is only one rank.

    Args:
        kinds: The names of the kinds.
        ranks: The number of ranks at the start.
        steps: The number of steps of the run.
        every: The number of steps in a window.
        seed: Decides everything.
        sizes: The numbers of ranks that follow.

    >>> for fault in draw_plan(["kill", "stop"], ranks=4, steps=17, every=5, seed=1):
    ...     print(fault.kind, fault.rank, fault.step, round(fault.fraction, 2))
    kill 3 3 0.12
    stop 1 9 0.65
    kill 3 11 0.89
    >>> [fault.step for fault in draw_plan(["kill"], ranks=2, steps=9, every=1, seed=1)]
    [1, 3, 5, 7]
    >>> draw_plan(["kill"], ranks=2, steps=2, every=1, seed=1)
    []
    >>> for each in draw_plan(["kill"], ranks=2, steps=40, every=10, seed=1, sizes=[4, 1]):
    ...     print(each if isinstance(each, Change) else f"rank {each.rank} at {each.step}")
    rank 0 at 10
    Change(ranks=4, step=13)
    rank 3 at 13
    Change(ranks=1, step=26)
    """
    rng = random.Random(seed)
    last = steps - 2
    changes = [Change(size, 1 + (i + 1) * last // (len(sizes) + 1)) for i, size in enumerate(sizes)]
    faults: list[Fault] = []
    bag: list[str] = []
    for window in range(1, last + 1, every):
        first = max(window, faults[-1].step + _LEAST_APART) if faults else window
        end = min(window + every - 1, last)
        if first > end:
            continue
        if not bag:
            bag = rng.sample(kinds, len(kinds))
        step, fraction = rng.randint(first, end), rng.random()
        there = next((change.ranks for change in reversed(changes) if change.step <= step), ranks)
        if there > 1:
            faults.append(Fault(bag.pop(0), rng.randrange(there), step, fraction))
    return sorted([*changes, *faults], key=lambda each: (each.step, isinstance(each, Fault)))
