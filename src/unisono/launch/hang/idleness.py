"""Finds ranks that do nothing, from outside: no CPU time, no I/O, no call that begins or ends.

Where no rank is in a collective, nothing else shows that all are stuck: each waits for a lock, a queue or a thread, or
some have ended and the others hang at their end. A server that waits for requests looks the same, so the report comes
once, as information (`launch.hang.idle_watch`). `Idleness` decides and is pure; `read_activity` asks the kernel. Start
reading at `Idleness`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from unisono.launch.hang.stacks import read_state
from unisono.launch.linux import descendants
from unisono.machine import kernel_text

__all__ = ["Activity", "Idleness", "read_activity"]

_IDLE = 0.02
"""The most cores that an idle rank keeps busy: threads of gloo and others wake up to poll."""
_IDLE_NBYTES = 4096
"""The most bytes that it reads meanwhile: questions of the launcher, and threads that wake each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """The activity of a rank so far, including all processes that it has started."""

    cpu_s: float = 0.0
    """CPU time in seconds."""
    read_nbytes: int = 0
    written_nbytes: int = 0
    """Includes printed output."""
    mark: tuple[int, int] = (0, 0)
    """Changes with each call of torch.distributed."""
    busy: bool = False
    """True if it runs at this moment, or is ready to, or is in the kernel, as for a slow disk."""


class Idleness:
    """Decides when ranks have done nothing for long enough to report it.

    Args:
        patience_s: Seconds without activity before a report; 0 for never.

    >>> idleness = Idleness(30.0)
    >>> idleness.look(0.0, ranks=[1], read=lambda: {1: Activity(cpu_s=5.0)})
    False
    >>> idleness.look(31.0, ranks=[1], read=lambda: {1: Activity(cpu_s=5.5)})
    True
    >>> idleness.for_s(40.0, ranks=[1], read=lambda: {1: Activity(cpu_s=5.5)})
    40.0
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self.since_s = 0.0
        """When the current observation began, on the clock of `look`."""
        self._read_s = 0.0
        self._before: Mapping[int, Activity] | None = None
        self._is_found = False

    def look(self, now_s: float, *, ranks: list[int], read: Callable[[], Mapping[int, Activity]]) -> bool:
        """Return True once the ranks have done nothing for long enough: once, until they do something.

        Args:
            now_s: The time.
            ranks: The ranks that still run, and are in no collective.
            read: Returns the activity of each of them so far. Called once in `patience_s`, since it takes a while.
        """
        if not self._patience_s or not ranks:
            return False
        if self._before is None or list(self._before) != ranks:
            self._begin(now_s, read())
            return False
        if now_s - self._read_s < self._patience_s:
            return False
        was_found = self._is_found
        return self.for_s(now_s, ranks=ranks, read=read) > 0 and not was_found

    def for_s(self, now_s: float, *, ranks: list[int], read: Callable[[], Mapping[int, Activity]]) -> float:
        """Return for how long the ranks have done nothing, if that is long enough; otherwise 0. See `look`."""
        past_s = now_s - self.since_s
        if self._before is None or list(self._before) != ranks or not 0 < self._patience_s <= past_s:
            return 0.0
        self._read_s, now = now_s, read()
        if any(_is_active(self._before[rank], now[rank], past_s) for rank in ranks):
            self._begin(now_s, now)
            return 0.0
        self._is_found = True
        return past_s

    def forget(self) -> None:
        """Start over: a rank is in a collective or has failed, which other reports cover."""
        self._before = None

    def _begin(self, now_s: float, activity: Mapping[int, Activity]) -> None:
        self.since_s = self._read_s = now_s
        self._before, self._is_found = activity, False


def read_activity(pid: int, mark: tuple[int, int]) -> Activity:
    """Return what a rank has done so far, from the kernel; `mark` is that of its status block."""
    cpu_s, read, written, busy = 0.0, 0, 0, False
    for process in (pid, *descendants(pid)):
        state = read_state(process)
        cpu_s += state.cpu_s
        busy |= state.state in ("running", "in the kernel")
        counts = _io_counts(process)
        read += counts.get("rchar", 0)
        written += counts.get("wchar", 0)
    return Activity(cpu_s=cpu_s, read_nbytes=read, written_nbytes=written, mark=mark, busy=busy)


def _is_active(before: Activity, now: Activity, past_s: float) -> bool:
    # The counts of a child that has ended are missing now. Its end is activity, too.
    return (
        not 0 <= now.cpu_s - before.cpu_s <= _IDLE * past_s
        or not 0 <= now.read_nbytes - before.read_nbytes <= _IDLE_NBYTES
        or now.written_nbytes != before.written_nbytes
        or now.mark != before.mark
        or now.busy
    )


def _io_counts(pid: int) -> dict[str, int]:
    # Empty if it has ended or the kernel does not show it: then CPU time decides.
    lines = kernel_text(f"/proc/{pid}/io").splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
