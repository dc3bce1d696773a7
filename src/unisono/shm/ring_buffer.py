"""A one-way ring of cells in shared memory, from one rank to another: what messages travel through, piece by piece.

A message is a header and its bytes, cut at the size of a cell; messages do not share cells. The writer counts the cells
that it filled on one semaphore, the reader those that it emptied on another: both publish a cell by the order of memory
that a semaphore gives. Which message is for which receive is decided in `point_to_point`.
"""

from __future__ import annotations

import ctypes

from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["NUM_CELLS", "RingReader", "RingWriter", "create_ring", "ring_nbytes"]

NUM_CELLS = 8
"""Cells of a ring: enough that the writer fills one while the reader empties another, also when one is late."""

_HEADER = ctypes.c_int64 * 2
_HEADERS_NBYTES = aligned(NUM_CELLS * ctypes.sizeof(_HEADER))
_SEMAPHORES_NBYTES = aligned(2 * SEMAPHORE_NBYTES)


def ring_nbytes(cell_nbytes: int) -> int:
    """Compute how much of a segment a ring takes."""
    return _SEMAPHORES_NBYTES + _HEADERS_NBYTES + NUM_CELLS * cell_nbytes


def create_ring(segment: Segment, offset: int) -> None:
    """Prepare the memory of a ring: once, before the segment is shared."""
    for i in range(2):
        Semaphore(segment.address + offset + i * SEMAPHORE_NBYTES).create()


class _End:
    """What both ends of a ring have: the semaphores, and where headers and cells lie."""

    __slots__ = ("_cells", "_count", "_filled", "_freed", "_headers", "_segment", "cell_nbytes")

    def __init__(self, segment: Segment, offset: int, *, cell_nbytes: int) -> None:
        start = segment.address + offset
        self._segment = segment  # the addresses are good as long as it is mapped
        self._filled, self._freed = Semaphore(start), Semaphore(start + SEMAPHORE_NBYTES)
        headers = start + _SEMAPHORES_NBYTES
        self._headers = [_HEADER.from_address(headers + i * ctypes.sizeof(_HEADER)) for i in range(NUM_CELLS)]
        self._cells = [headers + _HEADERS_NBYTES + i * cell_nbytes for i in range(NUM_CELLS)]
        self._count = 0
        self.cell_nbytes = cell_nbytes


class RingWriter(_End):
    """The end that fills cells. One thread at a time may use it."""

    __slots__ = ("_free",)

    def __init__(self, segment: Segment, offset: int, *, cell_nbytes: int) -> None:
        super().__init__(segment, offset, cell_nbytes=cell_nbytes)
        self._free = NUM_CELLS

    def may_write(self) -> bool:
        """Return True if a cell is free."""
        if not self._free and self._freed.try_wait():
            self._free = 1
        return self._free > 0

    def write(self, tag: int, total: int, address: int, nbytes: int) -> None:
        """Fill a free cell with bytes from an address.

        Args: tag and total, the bytes of the whole message, are its header; they count in its first cell.
        """
        place = self._count % NUM_CELLS
        header = self._headers[place]
        header[0], header[1] = tag, total
        if nbytes:
            ctypes.memmove(self._cells[place], address, nbytes)
        self._count += 1
        self._free -= 1
        self._filled.post()


class RingReader(_End):
    """The end that empties cells. One thread at a time may use it."""

    __slots__ = ("_ready",)

    def __init__(self, segment: Segment, offset: int, *, cell_nbytes: int) -> None:
        super().__init__(segment, offset, cell_nbytes=cell_nbytes)
        self._ready = False

    def may_read(self) -> bool:
        """Return True if a cell is filled."""
        if not self._ready:
            self._ready = self._filled.try_wait()
        return self._ready

    def header(self) -> tuple[int, int]:
        """Return tag and total bytes of the message that begins in the filled cell."""
        tag, total = self._headers[self._count % NUM_CELLS]
        return tag, total

    def read(self, address: int, nbytes: int) -> bool:
        """Empty the filled cell into an address; nothing is copied for 0 bytes.

        Returns: whether the writer should be woken if it sleeps. It is told of every cell, but sleeps only when all are
        filled, so that every half ring is enough: a wake-up costs more than a small message.
        """
        if nbytes:
            ctypes.memmove(address, self._cells[self._count % NUM_CELLS], nbytes)
        self._count += 1
        self._ready = False
        self._freed.post()
        return self._count % (NUM_CELLS // 2) == 0
