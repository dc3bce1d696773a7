"""Slots through which ranks exchange data, in rounds.

In a round every rank may write its slot. It then publishes the slot, by a semaphore for each peer, and reads the slots
that it needs of other ranks once they are published. All ranks of a group go through the same rounds in the same order,
even without anything to write or read, so a rank that publishes a round has read those up to `_LOOKAHEAD` rounds before
it. Hence a slot can be used again without a lock: see `readers`. Each slot has a short header that describes the data.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from unisono.shm.peers import Peers
from unisono.shm.segment import Segment, aligned
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["DEPTH", "SlotRing"]

DEPTH = 8
"""The number of rounds for which the content of a slot stays readable."""

_LOOKAHEAD = 3
"""A rank has read round n before it publishes round n + _LOOKAHEAD. Collectives are written so that this holds."""

_HEADER_LEAST_NBYTES = 64


class SlotRing:
    """The slots of a group, and the count of its rounds. One thread at a time may use it.

    Args:
        segment: The segment of the group.
        offset: The aligned offset of the slots in the segment.
        peers: The processes of the group.
        slot_nbytes: The aligned size of a slot.
    """

    def __init__(self, segment: Segment, offset: int, peers: Peers, *, slot_nbytes: int) -> None:
        self.rank, self.size = peers.rank, peers.size
        self.slot_nbytes = slot_nbytes
        self.round = 0
        """The coming round; equal to the number of rounds that this rank has published."""
        self.others = [r for r in range(self.size) if r != self.rank]
        """All ranks but this one."""
        self._published = [0] * self.size
        semaphores = [
            [
                Semaphore(segment.address + offset + (source * self.size + target) * SEMAPHORE_NBYTES)
                for target in range(self.size)
            ]
            for source in range(self.size)
        ]
        self._outgoing = [semaphores[self.rank][r].post for r in self.others]
        self._incoming = [semaphores[r][self.rank] for r in range(self.size)]
        self._segment, self._memory = segment, segment.memory
        self._headers_offset = offset + aligned(self.size**2 * SEMAPHORE_NBYTES)
        self._header_nbytes = _header_nbytes(self.size)
        self._slots_offset = self._headers_offset + aligned(self.size * DEPTH * self._header_nbytes)
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}

    @staticmethod
    def nbytes(size: int, *, slot_nbytes: int) -> int:
        """Return the size of the slots of a group in a segment."""
        slots = size * DEPTH
        return aligned(size**2 * SEMAPHORE_NBYTES) + aligned(slots * _header_nbytes(size)) + slots * slot_nbytes

    @staticmethod
    def create(segment: Segment, offset: int, size: int) -> None:
        """Initialize the memory. Call it once, before the segment is shared."""
        for i in range(size**2):
            Semaphore(segment.address + offset + i * SEMAPHORE_NBYTES).create()

    def slot(self, rank: int, round_: int, dtype: torch.dtype) -> Tensor:
        """Return a rank's whole slot of a round, with shape [slot_nbytes / itemsize]."""
        views = self._views.get(dtype)
        if views is None:
            shape = (self.size, DEPTH, self.slot_nbytes // dtype.itemsize)
            all_slots = self._segment.tensor(self._slots_offset, shape, dtype)
            views = self._views[dtype] = [list(of_rank.unbind()) for of_rank in all_slots.unbind()]
        return views[rank][round_ % DEPTH]

    def address(self, rank: int, round_: int) -> int:
        """Return the address of a rank's slot of a round."""
        place = rank * DEPTH + round_ % DEPTH
        return self._segment.address + self._slots_offset + place * self.slot_nbytes

    def write_header(self, header: bytes) -> None:
        """Write this rank's header of the coming round: at most 64 bytes, and 8 for each rank."""
        assert len(header) <= self._header_nbytes
        start = self._headers_offset + (self.rank * DEPTH + self.round % DEPTH) * self._header_nbytes
        self._memory[start : start + len(header)] = header

    def header(self, rank: int, round_: int, nbytes: int) -> bytes:
        """Return the first `nbytes` bytes of a rank's header of a round."""
        start = self._headers_offset + (rank * DEPTH + round_ % DEPTH) * self._header_nbytes
        return self._memory[start : start + nbytes]

    def readers(self) -> tuple[int, list[int]]:
        """Return a round, and the ranks that must publish it before this rank may write its slot of the coming round.

        Until then they may still be reading the slot. Without ranks the slot is free.
        """
        round_ = self.round - DEPTH + _LOOKAHEAD
        return round_, self.missing(round_, self.others)

    def publish(self) -> int:
        """Publish this rank's slot of the coming round, and advance to the next. Return the published round."""
        for post in self._outgoing:
            post()
        self.round += 1
        return self.round - 1

    def missing(self, round_: int, ranks: Iterable[int]) -> list[int]:
        """Return those of the given ranks that have not published a round yet."""
        published, late = self._published, []
        for rank in ranks:
            while published[rank] <= round_:
                if not self._incoming[rank].try_wait():
                    late.append(rank)
                    break
                published[rank] += 1
        return late

    def wait_for(self, rank: int, timeout_s: float) -> None:
        """Sleep until a rank publishes a round, for at most `timeout_s`."""
        if self._incoming[rank].wait(timeout_s):
            self._published[rank] += 1


def _header_nbytes(size: int) -> int:
    return aligned(_HEADER_LEAST_NBYTES + 8 * size)
