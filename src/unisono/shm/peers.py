"""The processes of a group's ranks on this host, and which of them have ended.

A process is identified by a pidfd, which never refers to another process and works across PID namespaces.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Newcomers", "Peers", "own_process"]


def own_process() -> str:
    """Return a description by which other processes of the host find this one: PID namespace, PID and start time."""
    return f"{_namespace()} {os.getpid()} {_started(os.getpid())}"


class Newcomers:
    """The known processes of ranks that are joining a group.

    A process of another PID namespace cannot be found by its PID, and counts as alive.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._ended: set[int] = set()

    def __enter__(self) -> Newcomers:
        return self

    def __exit__(self, *_: object) -> None:
        _close([*self._pidfds.values()])

    def add(self, rank: int, process: str) -> None:
        """Add a rank. `process` is the value of `own_process` there."""
        namespace, pid, started = process.split()
        if namespace != str(_namespace()):
            return
        try:
            fd = os.pidfd_open(int(pid))
        except ProcessLookupError:
            self._ended.add(rank)
            return
        self._pidfds[rank] = fd
        if _started(int(pid)) != started:  # another process has got its PID
            self._ended.add(rank)

    def dead(self) -> list[int]:
        """Return the ranks whose process has ended, in order."""
        return sorted(self._ended | {rank for rank, fd in self._pidfds.items() if _has_ended(fd)})


class Peers:
    """The processes of a group, by rank in the group.

    Args:
        rank: The rank of this process.
        pidfds: A descriptor for each rank. This object closes them.
    """

    def __init__(self, rank: int, pidfds: Sequence[int]) -> None:
        self.rank, self.size = rank, len(pidfds)
        self._finalizer = weakref.finalize(self, _close, tuple(pidfds))
        self._finalizer.atexit = False  # the system closes them at exit
        self._ranks = {fd: r for r, fd in enumerate(pidfds) if r != rank}
        self._lock = threading.Lock()  # one thread at a time may poll
        self._poll = select.poll()
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)

    def dead(self) -> list[int]:
        """Return the ranks whose process has ended, in order, without this one. Costs some microseconds."""
        with self._lock:
            return sorted(self._ranks[fd] for fd, _ in self._poll.poll(0))

    def close(self) -> None:
        """Close the descriptors."""
        with self._lock:
            self._finalizer()
            self._ranks, self._poll = {}, select.poll()


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _started(pid: int) -> str:
    """Return the start time of a process, in clock ticks since boot, or an empty string if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _close(pidfds: Sequence[int]) -> None:
    for fd in pidfds:
        os.close(fd)
