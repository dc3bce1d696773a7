"""All-gather and all-to-all of messages of any size, for sparse gradients.

A message is the bytes of a few vectors in order, each aligned. `GroupAllGatherV` sends it through the process group;
the shared-memory engine has `engine.shared.shared_all_gather_v` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.freed_wait import run_collective
from unisono.collectives.world import World
from unisono.engine.step_transaction import StepTransaction
from unisono.plan.alignment import WIRE_NBYTES, align_up

__all__ = ["AllGatherV", "GroupAllGatherV", "GroupAllToAllV", "MessageReader", "packed_nbytes", "write_parts"]


class AllGatherV(Protocol):
    """Makes one message of each rank available to all ranks."""

    def post(self, parts: Sequence[Tensor]) -> None:
        """Post this rank's message: vectors, which must not be touched until `collect` has returned."""

    def collect(self, step: StepTransaction) -> Sequence[Tensor]:
        """Return the messages of all ranks, which may be padded at the end and must be read before this step ends.

        Every rank must call it, after `post`.
        """


def packed_nbytes(parts: Sequence[Tensor]) -> int:
    """Return the length of a message in bytes."""
    return sum(align_up(part.numel() * part.element_size(), WIRE_NBYTES) for part in parts)


def write_parts(parts: Sequence[Tensor], place: Tensor) -> None:
    """Write a message to `place`, a tensor of bytes that is at least as long."""
    offset = 0
    for part in parts:
        nbytes = part.numel() * part.element_size()
        place[offset : offset + nbytes].view(part.dtype).copy_(part)
        offset += align_up(nbytes, WIRE_NBYTES)


class MessageReader:
    """Reads the vectors of a message in order.

    Args:
        message: What `write_parts` has written, and maybe more behind it.
    """

    def __init__(self, message: Tensor) -> None:
        self._message, self._offset = message, 0

    def next(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the next vector, a view of the message."""
        nbytes = numel * dtype.itemsize
        part = self._message.narrow(0, self._offset, nbytes).view(dtype)
        self._offset += align_up(nbytes, WIRE_NBYTES)
        return part


class GroupAllGatherV:
    """Sends messages through the process group: first their lengths, then the messages, padded to the longest."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: Sequence[Tensor] = ()

    def post(self, parts: Sequence[Tensor]) -> None:
        """Store the message until `collect` sends it; see `AllGatherV`."""
        self._parts = parts

    def collect(self, step: StepTransaction) -> Sequence[Tensor]:
        """Send this rank's message and receive those of the others; see `AllGatherV`."""
        own = torch.tensor([packed_nbytes(self._parts)], device=self._world.device)
        longest = max(int(length) for length in self._gather(own))
        message = torch.empty(longest, dtype=torch.uint8, device=self._world.device)
        write_parts(self._parts, message)
        self._parts = ()
        return self._gather(message)

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        everyone = [torch.empty_like(tensor) for _ in range(self._world.size)]
        run_collective(dist.all_gather, everyone, tensor, group=self._world.group)
        return everyone


class GroupAllToAllV:
    """Sends a message to each rank through the process group: first all lengths, then the messages.

    Its calls are those of `AllGatherV`, but for what `post` takes.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._parts: Sequence[Sequence[Tensor]] = ()
        self.sent_nbytes = 0
        """The bytes that the last messages of this rank to others had."""

    def post(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Store the messages until `collect` sends them: for each rank some vectors."""
        self._parts = parts

    def collect(self, step: StepTransaction) -> Sequence[Tensor]:
        """Send the messages, and return one of each rank. Every rank must call it, after `post`."""
        sizes = [packed_nbytes(parts) for parts in self._parts]
        own = torch.tensor(sizes)
        theirs = torch.empty_like(own)
        dist.all_to_all_single(theirs, own, group=self._world.group)
        message = torch.empty(sum(sizes), dtype=torch.uint8)
        for parts, place in zip(self._parts, torch.split(message, sizes), strict=True):
            write_parts(parts, place)
        self._parts = ()
        lengths: list[int] = theirs.tolist()
        received = torch.empty(sum(lengths), dtype=torch.uint8)
        dist.all_to_all_single(received, message, lengths, sizes, group=self._world.group)
        self.sent_nbytes = sum(sizes) - sizes[self._world.rank]
        return torch.split(received, lengths)
