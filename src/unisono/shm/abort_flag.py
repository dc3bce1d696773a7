"""Flags by which a rank tells the others that it has aborted the group, and why, or that it has left.

Each rank has an area for its reason and a semaphore for each peer, which it posts once there is something to read. A
peer looks only after it has waited for a while in vain, so the flags cost nothing unless something goes wrong.
"""

from __future__ import annotations

import threading

from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["AbortFlag"]

_REASON_NBYTES = 1024


class AbortFlag:
    """Tells the ranks of a group that it has been aborted, and which ranks have left it. Thread-safe.

    Args:
        segment: The segment of the group.
        offset: The aligned offset of the flags in the segment.
        rank: The rank of this process in the group.
        size: The number of ranks in the group.
    """

    def __init__(self, segment: Segment, offset: int, *, rank: int, size: int) -> None:
        self._segment, self._rank, self._size = segment, rank, size
        self._offset = offset
        self._texts_offset = offset + aligned(size**2 * SEMAPHORE_NBYTES)
        self._lock = threading.Lock()
        self._aborted = False
        self.reason: str | None = None
        """Why the group was aborted, as far as this rank knows; None if it was not."""
        self.left: set[int] = set()
        """Ranks that have left the group, as far as this rank knows."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the size of the flags in a segment."""
        return aligned(size**2 * SEMAPHORE_NBYTES) + size * _REASON_NBYTES

    @staticmethod
    def create(segment: Segment, offset: int, size: int) -> None:
        """Initialize the memory. Call it once, before the segment is shared."""
        for i in range(size**2):
            Semaphore(segment.address + offset + i * SEMAPHORE_NBYTES).create()

    def abort(self, reason: str) -> None:
        """Abort the group on all ranks. Only the first reason counts."""
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
        """Signal all peers that this rank no longer takes part in anything."""
        with self._lock:
            self._post_all()

    def poll(self) -> None:
        """Read the flags of the other ranks and update `reason` and `left`."""
        with self._lock:
            for source in range(self._size):
                if source != self._rank and self._semaphore(source, self._rank).try_wait():
                    self.left.add(source)  # a rank that aborts no longer takes part either
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
