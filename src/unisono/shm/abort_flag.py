"""How a rank that aborts its group, or leaves it, lets the other ranks know, and why.

Each rank has an area for its reason, and a semaphore for each peer, posted once there is something to read. A peer
looks only when it has waited for a while in vain, so this costs nothing as long as all goes well.
"""

from __future__ import annotations

import threading

from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["AbortFlag"]

_REASON_NBYTES = 1024


class AbortFlag:
    """Whether the group has been aborted, and which ranks have left it. Any thread may use it.

    Args: offset is where it lies in the segment, aligned. rank is this process's own, in the group.
    """

    def __init__(self, segment: Segment, offset: int, *, rank: int, size: int) -> None:
        self._segment, self._rank, self._size = segment, rank, size
        self._offset = offset
        self._texts_offset = offset + aligned(size**2 * SEMAPHORE_NBYTES)
        self._lock = threading.Lock()
        self._aborted = False
        self.reason: str | None = None
        """Why the group is broken, as far as this rank knows; None while it is whole."""
        self.left: set[int] = set()
        """Ranks that have left the group, as far as this rank knows."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the size of the flags in a segment."""
        return aligned(size**2 * SEMAPHORE_NBYTES) + size * _REASON_NBYTES

    @staticmethod
    def create(segment: Segment, offset: int, size: int) -> None:
        """Prepare the memory: once, before the segment is shared."""
        for i in range(size**2):
            Semaphore(segment.address + offset + i * SEMAPHORE_NBYTES).create()

    def abort(self, reason: str) -> None:
        """Break the group, for all peers. Only the first reason counts."""
        with self._lock:
            if self.reason is None:
                self.reason = reason
            if self._aborted:
                return
            self._aborted = True
            text = self.reason.encode()[: _REASON_NBYTES - 2]
            start = self._texts_offset + self._rank * _REASON_NBYTES
            self._segment.memory[start : start + 2 + len(text)] = len(text).to_bytes(2, "little") + text
            self._post_all()

    def leave(self) -> None:
        """Let all peers know that this rank takes part in nothing more."""
        with self._lock:
            self._post_all()

    def poll(self) -> None:
        """Read what the other ranks have posted: see `reason` and `left`."""
        with self._lock:
            for source in range(self._size):
                if source != self._rank and self._semaphore(source, self._rank).try_wait():
                    self.left.add(source)  # who has given up takes part in nothing more either
                    start = self._texts_offset + source * _REASON_NBYTES
                    length = int.from_bytes(self._segment.memory[start : start + 2], "little")
                    if length and self.reason is None:
                        text = self._segment.memory[start + 2 : start + 2 + length]
                        self.reason = text.decode(errors="replace")

    def _post_all(self) -> None:
        for target in range(self._size):
            if target != self._rank:
                self._semaphore(self._rank, target).post()

    def _semaphore(self, source: int, target: int) -> Semaphore:
        return Semaphore(self._segment.address + self._offset + (source * self._size + target) * SEMAPHORE_NBYTES)
