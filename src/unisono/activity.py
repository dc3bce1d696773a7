"""What this process waits for, for those who report on it, such as the launcher's recorder of calls.

Reports of hangs follow the functions of torch.distributed by themselves. What passes none of them is reported here:
waits in shared memory, and groups of the backend shm. Without an observer a wait costs half a microsecond more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

__all__ = ["GroupActivity", "Observed", "Wait", "WaitObserver", "groups", "observers"]


class Wait(NamedTuple):
    """One wait of this rank for the other ranks of a group."""

    name: str
    """What the user called."""
    group: str
    size: int
    """Number of ranks in the group."""
    sequence: int
    """Counts the waits of the group; equal on all ranks that wait for each other."""


WaitObserver = Callable[[Wait], Callable[[bool], None]]
"""Called before a wait, in the thread that waits. Returns what to call after it, with whether the wait failed."""


class GroupActivity(Protocol):
    """A group that keeps a record of its own calls."""

    @property
    def group_name(self) -> str:
        """The name that torch.distributed has for the group."""
        ...

    def pending(self) -> tuple[int, list[tuple[Any, float]]] | None:
        """Return what has not ended; any thread may ask.

        Returns:
            The number of the latest call, and the calls that have not ended, the oldest first, each with its age in
            seconds. None once the group has been destroyed.
        """
        ...


observers: list[WaitObserver] = []
groups: WeakSet[GroupActivity] = WeakSet()


class Observed:
    """A context in which this rank waits."""

    __slots__ = ("_ends", "_wait")

    def __init__(self, wait: Wait) -> None:
        self._wait = wait

    def __enter__(self) -> None:
        self._ends = [begin(self._wait) for begin in observers]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for end in self._ends:
            end(kind is not None)
