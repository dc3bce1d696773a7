"""Polling: with growing pauses, until a timeout, or skipped for a while where it does not pay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

__all__ = ["Backoff", "pauses", "wait_until"]

_LONGEST_PAUSE = 256


class Backoff:
    """Skips attempts that have not paid: after each one, twice as many turns as before and one more, up to 256.

    The caller checks `left`. If it is 0, the caller makes an attempt and calls `note`; otherwise it decrements `left`.

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
        """Turns to skip after the last attempt; 0 if it has paid."""
        self.left = 0
        """Those still to skip. Both are attributes, since a call would take longer than everything else here."""

    def note(self, *, paid: bool) -> None:
        """Record whether an attempt has paid."""
        self.left = self.pause = 0 if paid else min(2 * self.pause + 1, _LONGEST_PAUSE)


def pauses(first_s: float, longest_s: float) -> Iterator[float]:
    """Yield the seconds to sleep between attempts: twice as many each time, up to the longest.

    >>> from itertools import islice
    >>> list(islice(pauses(1.0, 5.0), 5))
    [1.0, 2.0, 4.0, 5.0, 5.0]
    """
    while True:
        yield first_s
        first_s = min(2 * first_s, longest_s)


def wait_until(condition: Callable[[], bool], timeout_s: float, *, pause_s: float = 0.005) -> bool:
    """Poll until a condition is true or the timeout has passed. Return True if it is true."""
    end_s = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < end_s:
        time.sleep(pause_s)
    return found
