"""All-gather and all-to-all of messages of any size, for sparse gradients.

A message is the bytes of a few vectors in order, each aligned. `GroupAllGatherV` sends it through the process group;
the shared-memory engine has `engine.shared.shared_all_gather_v` instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.freed_wait import run_collective, start_collective, wait_for_collective
from unisono.collectives.world import World
from unisono.engine.message_exchange import MessageExchange, next_slot
from unisono.engine.step_transaction import StepTransaction
from unisono.plan.alignment import WIRE_NBYTES, align_up

__all__ = ["AllGatherV", "GroupAllGatherV", "GroupAllToAllV", "MessageReader", "packed_nbytes", "write_parts"]

_MOST_SLOT_NBYTES = 256 << 10
"""At most an eighth of it is sent in vain once messages are about as long as the last ones."""
_HEAD_NBYTES = align_up(8, WIRE_NBYTES)


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


class _PostedGather(NamedTuple):
    """An all-gather that has begun."""

    own: Tensor
    """The length of this rank's message, and the message."""
    everyone: list[Tensor]
    """Of each rank the same, cut off where the slot ends."""
    work: dist.Work


class GroupAllGatherV:
    """Sends messages through the process group, in one collective where they are about as long as the last ones.

    Slots are as in `MessageExchange`. Long messages are sent once their lengths are known, so that they need no copy.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._slot = 0
        self._posted: _PostedGather | None = None

    def post(self, parts: Sequence[Tensor]) -> None:
        """Begin to send the message; see `AllGatherV`. Every rank must call it."""
        length, slot = packed_nbytes(parts), self._slot
        own = torch.empty(_HEAD_NBYTES + max(length, slot), dtype=torch.uint8, device=self._world.device)
        own[:8].view(torch.int64).fill_(length)
        write_parts(parts, own[_HEAD_NBYTES:])
        given = own[: _HEAD_NBYTES + slot]
        everyone = [torch.empty_like(given) for _ in range(self._world.size)]
        work = start_collective(dist.all_gather, everyone, given, group=self._world.group)
        self._posted = _PostedGather(own, everyone, work)

    def collect(self, step: StepTransaction) -> Sequence[Tensor]:
        """Return the messages of all ranks; see `AllGatherV`."""
        assert self._posted is not None, "post comes first"
        (own, everyone, work), self._posted = self._posted, None
        wait_for_collective(work)
        slot = self._slot
        longest = max(torch.stack([theirs[:8] for theirs in everyone]).view(torch.int64).view(-1).tolist())
        self._slot = 0 if longest > _MOST_SLOT_NBYTES else next_slot(slot, longest, _MOST_SLOT_NBYTES)
        messages = [theirs[_HEAD_NBYTES:] for theirs in everyone]
        if longest <= slot:
            return messages
        own = own[_HEAD_NBYTES + slot :]
        rest = torch.empty(longest - slot, dtype=torch.uint8, device=own.device)
        rest[: len(own)] = own
        rests = [torch.empty_like(rest) for _ in messages]
        run_collective(dist.all_gather, rests, rest, group=self._world.group)
        return [torch.cat(both) for both in zip(messages, rests, strict=True)] if slot else rests


class GroupAllToAllV:
    """Sends a message to each rank; its calls are those of `AllGatherV`, but for what `post` takes.

    Args:
        exchange: Sends the messages.
    """

    def __init__(self, exchange: MessageExchange) -> None:
        self._exchange = exchange

    def post(self, parts: Sequence[Sequence[Tensor]]) -> None:
        """Begin to send the messages: for each rank some vectors. Every rank must call it."""
        messages = []
        for of_rank in parts:
            write_parts(of_rank, message := torch.empty(packed_nbytes(of_rank), dtype=torch.uint8))
            messages.append(message)
        self._exchange.post(messages)

    def collect(self, step: StepTransaction) -> Sequence[Tensor]:
        """Return the message of each rank. Every rank must call it, after `post`."""
        return self._exchange.collect()[1]
