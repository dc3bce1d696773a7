"""Who the ranks of a group on this host are, and whether they still live.

A process is held by a pidfd, which the kernel never gives to another process, whatever namespace it was born in.
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Sequence

__all__ = ["Peers"]


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


def _close(pidfds: Sequence[int]) -> None:
    for fd in pidfds:
        os.close(fd)
