"""A one-way ring of cells in shared memory, through which messages travel from one rank to another, piece by piece.

A message is a header and its bytes, divided at the size of a cell; messages do not share cells. The writer counts the
cells that it has filled on one semaphore, the reader those that it has emptied on another. The memory order of the
semaphores publishes the cells. `point_to_point` decides which message is for which receive.
"""

from __future__ import annotations

import ctypes

from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["NUM_CELLS", "RingReader", "RingWriter", "create_ring", "ring_nbytes"]

NUM_CELLS = 8
"""The number of cells of a ring: enough to fill one while another is emptied, also when one side is late."""

_HEADER = ctypes.c_int64 * 2
_HEADERS_NBYTES = aligned(NUM_CELLS * ctypes.sizeof(_HEADER))
_SEMAPHORES_NBYTES = aligned(2 * SEMAPHORE_NBYTES)


def ring_nbytes(cell_nbytes: int) -> int:
    """Return the size of a ring in a segment."""
    return _SEMAPHORES_NBYTES + _HEADERS_NBYTES + NUM_CELLS * cell_nbytes


def create_ring(segment: Segment, offset: int) -> None:
    """Initialize the memory of a ring. Call it once, before the segment is shared."""
    for i in range(2):
        Semaphore(segment.address + offset + i * SEMAPHORE_NBYTES).create()


class _End:
    """The common part of both ends of a ring: the semaphores, and the addresses of headers and cells."""

    __slots__ = ("_cells", "_count", "_filled", "_freed", "_headers", "_segment")

    def __init__(self, segment: Segment, offset: int, *, cell_nbytes: int) -> None:
        start = segment.address + offset
        self._segment = segment  # the addresses are valid while it is mapped
        self._filled, self._freed = Semaphore(start), Semaphore(start + SEMAPHORE_NBYTES)
        headers = start + _SEMAPHORES_NBYTES
        self._headers = [_HEADER.from_address(headers + i * ctypes.sizeof(_HEADER)) for i in range(NUM_CELLS)]
        self._cells = [headers + _HEADERS_NBYTES + i * cell_nbytes for i in range(NUM_CELLS)]
        self._count = 0


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

        `tag` and `total`, the size of the whole message, are its header, which is read in its first cell only.
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
        """Empty the filled cell into an address; 0 bytes copy nothing. Return True if the writer should be woken.

        Every freed cell is counted, but the writer sleeps only when all are filled, so a wake-up for every half ring is
        enough: it costs more than a small message.
        """
        if nbytes:
            ctypes.memmove(address, self._cells[self._count % NUM_CELLS], nbytes)
        self._count += 1
        self._ready = False
        self._freed.post()
        return self._count % (NUM_CELLS // 2) == 0
