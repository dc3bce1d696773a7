"""All-gather and all-to-all of messages of any size, for sparse gradients.

A message is the bytes of a few vectors in order, each aligned. `GroupAllGatherV` sends it through the process group;
the shared-memory engine has `engine.shared.shared_all_gather_v` instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.freed_wait import run_collective
from unisono.collectives.world import World
from unisono.engine.message_exchange import MessageExchange
from unisono.engine.step_transaction import StepTransaction
from unisono.plan.alignment import WIRE_NBYTES, align_up

__all__ = ["AllGatherV", "GroupAllGatherV", "GroupAllToAllV", "MessageReader", "packed_nbytes", "write_parts"]

_MOST_SLOT_NBYTES = 256 << 10
"""At most an eighth of it is sent in vain once messages are about as long as the last ones."""


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
    return sum([align_up(part.numel() * part.itemsize, WIRE_NBYTES) for part in parts])


def write_parts(parts: Sequence[Tensor], place: Tensor) -> None:
    """Write a message to `place`, a tensor of bytes that is at least as long."""
    offset, address = 0, place.data_ptr()
    for part in parts:
        nbytes = part.numel() * part.itemsize
        if part.is_cpu and place.is_cpu and part.is_contiguous():  # a third of the time of torch's operations
            ctypes.memmove(address + offset, part.data_ptr(), nbytes)
        else:
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
    """Sends a message to each rank through the process group; see `MessageExchange` for the traffic.

    Its calls are those of `AllGatherV`, but for what `post` takes.
    """

    def __init__(self, world: World) -> None:
        self._exchange = MessageExchange(size=world.size, rank=world.rank, group=world.group, most=_MOST_SLOT_NBYTES)
        self._parts: Sequence[Sequence[Tensor]] = ()

    def post(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Store the messages until `collect` sends them: for each rank some vectors."""
        self._parts = parts

    def collect(self, step: StepTransaction) -> Sequence[Tensor]:
        """Send the messages, and return one of each rank. Every rank must call it, after `post`."""
        messages = []
        for parts in self._parts:
            write_parts(parts, message := torch.empty(packed_nbytes(parts), dtype=torch.uint8))
            messages.append(message)
        self._parts = ()
        return self._exchange.exchange(messages)[1]
