"""Asking again and again: with pauses, until a time is over, or not at all for a while where it does not pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

__all__ = ["Backoff", "pauses", "wait_until"]

_LONGEST_PAUSE = 256


class Backoff:
    """Leaves something out that has not paid: each time for twice as many turns, and one more, than before.

    The caller looks at `left`. If it is 0, it tries and notes whether that paid; otherwise it counts `left` down.

    >>> backoff, tried = Backoff(), []
    >>> for turn in range(20):
    ...     if backoff.left:
    ...         backoff.left -= 1
    ...     else:
    ...         tried.append(turn)
    ...         backoff.note(paid=False)
    >>> tried
    [0, 2, 6, 14]
    """

    __slots__ = ("left", "pause")

    def __init__(self) -> None:
        self.pause = 0
        """How many turns the last try put off the next one; 0 if it has paid."""
        self.left = 0
        """How many of them are still to come. Attributes, since a call would take longer than all else here."""

    def note(self, *, paid: bool) -> None:
        """Note whether a try has paid."""
        self.left = self.pause = 0 if paid else min(2 * self.pause + 1, _LONGEST_PAUSE)


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield how long to sleep between questions: twice as long each time, up to the longest.

    >>> from itertools import islice
    >>> list(islice(pauses(1.0, 5.0), 5))
    [1.0, 2.0, 4.0, 5.0, 5.0]
    """
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)


def wait_until(condition: Callable[[], bool], timeout_s: float, *, pause_s: float = 0.005) -> bool:
    """Ask until a condition is true or the time is over. Return whether it is true."""
    end_s = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < end_s:
        time.sleep(pause_s)
    return found
