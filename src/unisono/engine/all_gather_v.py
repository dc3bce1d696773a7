"""All-gather of messages of any size, for sparse gradients.

A message is the bytes of a few vectors in order, each aligned. `GroupAllGatherV` sends it through the process group;
the shared-memory engine has `engine.shared.shared_all_gather_v` instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.step_transaction import StepTransaction
from unisono.plan.alignment import WIRE_NBYTES, align_up

__all__ = ["AllGatherV", "GroupAllGatherV", "next_part", "packed_nbytes", "write_parts"]


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


def next_part(message: Tensor, dtype: torch.dtype, numel: int) -> tuple[Tensor, Tensor]:
    """Return the first vector of a message and the rest of the message, both as views."""
    nbytes = numel * dtype.itemsize
    return message[:nbytes].view(dtype), message[align_up(nbytes, WIRE_NBYTES) :]


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
        dist.all_gather(everyone, tensor, group=self._world.group)
        return everyone
