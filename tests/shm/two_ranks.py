"""Both ranks of a group of two, in one process: the parts that they share, without a handshake."""

from __future__ import annotations

import os

from unisono.shm.abort_flag import AbortFlag
from unisono.shm.peer_wait import PeerWait
from unisono.shm.peers import Peers
from unisono.shm.segment import Segment
from unisono.shm.slot_ring import SlotRing

_SLOTS_OFFSET = 4096
SLOT_NBYTES = 256


class Rank:
    """One rank: its slots, and how it waits."""

    def __init__(self, segment: Segment, rank: int, *, timeout_s: float = 30.0) -> None:
        self.peers = Peers(rank, [os.pidfd_open(os.getpid()) for _ in range(2)])
        self.slots = SlotRing(segment, _SLOTS_OFFSET, self.peers, slot_nbytes=SLOT_NBYTES)
        self.abort_flag = AbortFlag(segment, 0, rank=rank, size=2)
        self.waiting = PeerWait(
            self.abort_flag, self.peers, ranks=[0, 1], group="test", timeout_s=timeout_s, polls=False
        )


def two_ranks() -> tuple[Rank, Rank]:
    assert AbortFlag.nbytes(2) <= _SLOTS_OFFSET
    segment = Segment.create(_SLOTS_OFFSET + SlotRing.nbytes(2, slot_nbytes=SLOT_NBYTES), name="test")
    AbortFlag.create(segment, 0, 2)
    SlotRing.create(segment, _SLOTS_OFFSET, 2)
    return Rank(segment, 0), Rank(segment, 1)
