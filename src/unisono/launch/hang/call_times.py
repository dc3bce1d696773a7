"""When the latest calls of a rank began and ended, and what part of the time it has spent in them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["CallTime", "part_in_calls"]


class CallTime(NamedTuple):
    """The time of a call in a status block."""

    number: int
    """1 for the first call of the process."""
    started_ns: int
    """By the monotonic clock."""
    ended_ns: int | None
    """None while it runs."""
    place: int
    """Where `StatusBlock.call_at` reads what it is."""


def part_in_calls(times: Sequence[CallTime], *, now_ns: int, window_ns: int, is_all: bool) -> float:
    """Return the part of the latest time, from 0 to 1, that a rank has spent in calls; those of threads count once.

    Args:
        times: The latest calls, in any order.
        now_ns: The time until which to look.
        window_ns: The time to look at. It is shorter if there were more calls than are known.
        is_all: True if the rank has made no other calls than these.

    >>> calls = [CallTime(1, 0, 40, 0), CallTime(2, 50, 60, 1), CallTime(3, 80, None, 2)]
    >>> part_in_calls(calls, now_ns=100, window_ns=100, is_all=True)
    0.7
    >>> part_in_calls(calls[1:], now_ns=100, window_ns=100, is_all=False)
    0.6
    """
    since_ns = now_ns - window_ns
    if times and not is_all:
        since_ns = max(since_ns, min(each.started_ns for each in times))
    spent_ns, until_ns = 0, since_ns
    for each in sorted(times, key=lambda each: each.started_ns):
        ended_ns = now_ns if each.ended_ns is None else min(each.ended_ns, now_ns)
        spent_ns += max(0, ended_ns - max(each.started_ns, until_ns))
        until_ns = max(until_ns, ended_ns)
    return min(1.0, spent_ns / (now_ns - since_ns)) if now_ns > since_ns else 0.0
