"""Waits of this process for other ranks, for observers such as the launcher's recorder of calls.

The recorder follows the functions of torch.distributed on its own. Waits outside of them are reported here: those in
shared memory, unless a first look finds that no rank is awaited, those for messages of a step, between stages of a
pipeline and between ranks without shared memory, and those of groups of the backend shm. Without an observer, a wait
costs half a microsecond more. How long this process has waited for ranks and for batches is summed here too, while
somebody measures steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

__all__ = [
    "GroupActivity",
    "Observed",
    "TimedWait",
    "Wait",
    "WaitObserver",
    "WaitedTime",
    "groups",
    "loaded",
    "observers",
    "waited",
]


class Wait(NamedTuple):
    """One wait of this rank for the other ranks of a group."""

    name: str
    """The call that waits, as users know it."""
    group: str
    size: int
    """Number of ranks in the group."""
    sequence: int
    """Counts the waits of the group; equal on all ranks that wait for each other. 0 for a message."""
    peer: int | None = None
    """The rank of the job that a message is from or for; None if all ranks of the group are awaited."""


WaitObserver = Callable[[Wait], Callable[[bool], None]]
"""Called before a wait, in the thread that waits. Returns a function to call after it, with True if the wait failed."""


class GroupActivity(Protocol):
    """A group that records its calls."""

    @property
    def group_name(self) -> str:
        """The name of the group in torch.distributed."""
        ...

    def pending(self) -> tuple[int, list[tuple[Any, float]]] | None:
        """Return the calls that have not ended. Any thread may call this.

        Returns:
            The number of the latest call, and the calls that have not ended, oldest first, each with its age in
            seconds. None once the group has been destroyed.
        """
        ...


class WaitedTime:
    """How long this process has waited, while `is_on`."""

    __slots__ = ("is_on", "seconds")

    def __init__(self) -> None:
        self.is_on = False
        self.seconds = 0.0


class TimedWait:
    """Context manager that adds the time within it, once: waits within it that are counted by themselves are parts."""

    __slots__ = ("_before_s", "_begun_s", "_sum")

    def __init__(self, of: WaitedTime) -> None:
        self._sum = of

    def __enter__(self) -> None:
        self._before_s = self._sum.seconds
        self._begun_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._sum.seconds = self._before_s + time.perf_counter() - self._begun_s


observers: list[WaitObserver] = []
waited = WaitedTime()
"""For other ranks: the waits that observers see, polling, and the calls of unisono.comm. A Trainer turns it on for the
steps that it measures, a RunLog for all of its loop: steps do not run within each other."""
loaded = WaitedTime()
"""For batches of `unisono.data.loader`."""
groups: WeakSet[GroupActivity] = WeakSet()


class Observed:
    """Context manager that reports a wait to all observers."""

    __slots__ = ("_begun_s", "_ends", "_wait")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        self._begun_s = time.perf_counter() if waited.is_on else math.inf
        self._ends = [begin(self._wait) for begin in observers]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if waited.is_on and self._begun_s < math.inf:
            waited.seconds += time.perf_counter() - self._begun_s
        for end in self._ends:
            end(kind is not None)
