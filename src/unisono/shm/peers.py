"""Who the ranks of a group on this host are, and whether they still live.

A process is held by a pidfd, which the kernel never gives to another process, whatever namespace it was born in.
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
    """Describe this process so that another one of its host can find it: its namespace, number and start."""
    return f"{_namespace()} {os.getpid()} {_started(os.getpid())}"


class Newcomers:
    """The processes of ranks that are on their way into a group, as far as they are known.

    A process of another process namespace cannot be found by its number, and is taken to live.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}
        self._ended: set[int] = set()

    def __enter__(self) -> Newcomers:
        return self

    def __exit__(self, *_: object) -> None:
        _close([*self._pidfds.values()])

    def add(self, rank: int, process: str) -> None:
        """Watch over a rank. Args: process is what its `own_process` returned."""
        namespace, pid, started = process.split()
        if namespace != str(_namespace()):
            return
        try:
            fd = os.pidfd_open(int(pid))
        except ProcessLookupError:
            self._ended.add(rank)
            return
        self._pidfds[rank] = fd
        if _started(int(pid)) != started:  # another process has its number by now
            self._ended.add(rank)

    def dead(self) -> list[int]:
        """List the ranks whose process has ended, in order."""
        return sorted(self._ended | {rank for rank, fd in self._pidfds.items() if _has_ended(fd)})


class Peers:
    """The processes of a group, by rank in the group.

    Args: rank is this process's own. pidfds has one descriptor for each rank; they are closed with this object.
    """

    def __init__(self, rank: int, pidfds: Sequence[int]) -> None:
        self.rank, self.size = rank, len(pidfds)
        self._finalizer = weakref.finalize(self, _close, tuple(pidfds))
        self._finalizer.atexit = False  # the system does it then
        self._ranks = {fd: r for r, fd in enumerate(pidfds) if r != rank}
        self._lock = threading.Lock()  # one thread at a time may poll
        self._poll = select.poll()
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)

    def dead(self) -> list[int]:
        """List the ranks whose process has ended, in order; never this one. Costs some microseconds."""
        with self._lock:
            return sorted(self._ranks[fd] for fd, _ in self._poll.poll(0))

    def close(self) -> None:
        """Let go of the processes."""
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
    """Return when a process was started, in ticks since the system was; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _close(pidfds: Sequence[int]) -> None:
    for fd in pidfds:
        os.close(fd)
