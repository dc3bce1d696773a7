"""How a rank that gives up, or leaves, tells the other ranks of its group, and why.

Its own area holds the reason in words; a bell for each peer says that there is something to read. A peer looks only
when it has waited for a while in vain, so this costs nothing as long as all goes well.
"""

from __future__ import annotations

import threading

from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["AbortFlag"]

_REASON_NBYTES = 1024


class AbortFlag:
    """The notices of a group's ranks. Any thread may use it.

    Args: offset is where it lies in the segment, aligned. rank is this process's own, in the group.
    """

    def __init__(self, segment: Segment, offset: int, *, rank: int, size: int) -> None:
        self._segment, self._rank, self._size = segment, rank, size
        self._offset = offset
        self._texts_offset = offset + aligned(size**2 * SEMAPHORE_NBYTES)
        self._lock = threading.Lock()
        self._sounded = False
        self.reason: str | None = None
        """Why the group is broken, as far as this rank has heard; None while it is whole."""
        self.left: set[int] = set()
        """Ranks that have left the group, as far as this rank has heard."""

    @staticmethod
    def nbytes(size: int) -> int:
        """Compute how much of a segment the notices take."""
        return aligned(size**2 * SEMAPHORE_NBYTES) + size * _REASON_NBYTES

    @staticmethod
    def create(segment: Segment, offset: int, size: int) -> None:
        """Prepare the memory: once, before the segment is shared."""
        for i in range(size**2):
            Semaphore(segment.address + offset + i * SEMAPHORE_NBYTES).create()

    def sound(self, reason: str) -> None:
        """Tell all peers that the group is broken. Only the first reason counts."""
        with self._lock:
            if self.reason is None:
                self.reason = reason
            if self._sounded:
                return
            self._sounded = True
            text = self.reason.encode()[: _REASON_NBYTES - 2]
            start = self._texts_offset + self._rank * _REASON_NBYTES
            self._segment.memory[start : start + 2 + len(text)] = len(text).to_bytes(2, "little") + text
            self._ring()

    def leave(self) -> None:
        """Tell all peers that this rank takes part in nothing more."""
        with self._lock:
            self._ring()

    def listen(self) -> None:
        """Take up the notices of the others: see `reason` and `left`."""
        with self._lock:
            for source in range(self._size):
                if source != self._rank and self._bell(source, self._rank).try_take():
                    self.left.add(source)  # who has given up takes part in nothing more either
                    start = self._texts_offset + source * _REASON_NBYTES
                    length = int.from_bytes(self._segment.memory[start : start + 2], "little")
                    if length and self.reason is None:
                        text = self._segment.memory[start + 2 : start + 2 + length]
                        self.reason = text.decode(errors="replace")

    def _ring(self) -> None:
        for target in range(self._size):
            if target != self._rank:
                self._bell(self._rank, target).ring()

    def _bell(self, source: int, target: int) -> Semaphore:
        return Semaphore(self._segment.address + self._offset + (source * self._size + target) * SEMAPHORE_NBYTES)
