"""Receives of short messages between hosts that begin before the other side sends.

A sender of gloo waits until it has heard that the other side receives, so a message takes two ways over the link. If
its receive has begun in time, it takes one. What has begun cannot be taken back, as when a step fails: the receive
stays, for the next message of this length, from whichever part of the run that comes.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import Wait
from unisono.collectives.world import World

__all__ = ["EARLY_TAGS", "EarlyReceive", "EarlyReceives"]

_UNIT_NBYTES = 128
"""What lengths are multiples of: vectors for two ranks or more, of numbers of one byte or more, are."""
_MOST_NBYTES = 512 << 10
EARLY_TAGS = 1 + _MOST_NBYTES // _UNIT_NBYTES
"""The number of tags: each length has its own."""


class EarlyReceive(NamedTuple):
    """A receive that has begun."""

    seen: Wait
    """How observers see a wait for it."""
    work: dist.Work
    memory: Tensor
    """uint8."""


class EarlyReceives:
    """The early receives of one run, by peer and length. Memory: that of the messages, up to twice.

    Args:
        world: The ranks, on CPUs.
        tag: The first of `EARLY_TAGS` tags that no other messages of the group have, equal on all ranks.
    """

    def __init__(self, world: World, tag: int) -> None:
        assert world.group is not None
        self._group, self._tag = world.group, tag
        self._seen = {peer: world.wait_for(peer) for peer in range(world.size) if peer != world.rank}
        self._begun: dict[tuple[int, int], deque[EarlyReceive]] = {}
        self._free: dict[int, list[Tensor]] = {}

    def expect(self, peer: int, nbytes: int, count: int = 1) -> None:
        """Begin to receive messages, unless so many receives have begun. Local.

        Args:
            peer: The rank that sends.
            nbytes: The length of each message.
            count: How many there are.
        """
        begun = self._begun.setdefault((peer, nbytes), deque())
        while len(begun) < count:
            free = self._free.get(nbytes)
            memory = free.pop() if free else torch.empty(nbytes, dtype=torch.uint8)
            work = self._group.recv([memory], peer, self._tag_of(nbytes))
            begun.append(EarlyReceive(self._seen[peer], work, memory))

    def take(self, peer: int, nbytes: int) -> EarlyReceive:
        """Return the receive of the next message. Messages of a length come in the order in which they are sent."""
        self.expect(peer, nbytes)
        return self._begun[peer, nbytes].popleft()

    def give_back(self, memory: Tensor) -> None:
        """Use the memory of a message again."""
        self._free.setdefault(len(memory), []).append(memory)

    def send(self, peer: int, tensor: Tensor) -> tuple[Wait, dist.Work]:
        """Begin to send a message. Return how observers see a wait for its end, and the work."""
        work = self._group.send([tensor], peer, self._tag_of(tensor.numel() * tensor.itemsize))
        return self._seen[peer], work

    def _tag_of(self, nbytes: int) -> int:
        assert nbytes <= _MOST_NBYTES and not nbytes % _UNIT_NBYTES, f"messages of {nbytes} bytes have no tag"
        return self._tag + nbytes // _UNIT_NBYTES
