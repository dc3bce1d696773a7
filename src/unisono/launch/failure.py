"""Which rank failed first, and how that is said. Pure functions; start reading at `first_failure`."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["Failure", "exit_status", "first_failure", "name_ranks", "name_signal"]

_LEAD_NS = 50_000_000
"""How much earlier a rank that ended without a word may have failed than its end was seen. Its connections close before
that, so a peer's error can be on record first. A peer that is not at fault needs longer than this to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """One rank's failure."""

    rank: int
    code: int
    """Its exit code; a negative number is the signal that ended it, as in `subprocess`."""
    time_ns: int
    """When it failed, by the monotonic clock: when it raised an error or, if it did not say, when its end was seen."""
    reported: bool
    """Whether the rank itself told, on its way out."""

    def describe(self) -> str:
        """Say what happened.

        >>> Failure(rank=1, code=-9, time_ns=0, reported=False).describe()
        'rank 1 was killed by SIGKILL'
        """
        if self.code < 0:
            return f"rank {self.rank} was killed by {name_signal(-self.code)}"
        return f"rank {self.rank} exited with code {self.code}"


def first_failure(failures: Collection[Failure]) -> Failure:
    """Find the cause among several failures: the earliest one.

    A rank that raised an error has told when. For one that was killed only its end is known, which is a little late,
    so it gets a head start. SIGABRT gets none: libraries abort when a peer is lost.

    >>> raised = Failure(rank=0, code=1, time_ns=1_000_000, reported=True)
    >>> killed = Failure(rank=1, code=-9, time_ns=1_200_000, reported=False)
    >>> first_failure([raised, killed]).rank
    1
    """

    def failed_ns(failure: Failure) -> int:
        sure = failure.reported or failure.code == -signal.SIGABRT
        return failure.time_ns if sure else failure.time_ns - _LEAD_NS

    return min(failures, key=failed_ns)


def exit_status(code: int) -> int:
    """Translate the code of a process into the one with which a shell would report it.

    >>> exit_status(3), exit_status(-9)
    (3, 137)
    """
    return code if code >= 0 else 128 - code


def name_ranks(ranks: Collection[int]) -> str:
    """Name ranks in a sentence.

    >>> name_ranks([2]), name_ranks([0, 1, 3])
    ('rank 2', 'ranks 0, 1 and 3')
    """
    *first, last = sorted(ranks)
    return f"ranks {', '.join(map(str, first))} and {last}" if first else f"rank {last}"


def name_signal(signum: int) -> str:
    """Name a signal; those without a name in Python (real-time signals) by number.

    >>> name_signal(9), name_signal(40)
    ('SIGKILL', 'signal 40')
    """
    known = {int(known): known.name for known in signal.Signals}
    return known.get(signum, f"signal {signum}")
