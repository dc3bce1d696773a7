"""All-to-all of messages of any size, in one collective where they are about as long as the last ones.

Ranks do not know how much the others will send. To tell them first takes a collective of its own, and each one takes
the latency of the network, which is most of the time of short ones. So each message travels in a slot of a fixed
length, behind the lengths of all messages of its sender, and what does not fit follows in a second collective. The
slots of the next exchange are as long as the longest message of this one, which all ranks have been told, and an eighth
more; and not much shorter than those of this one, since long and short messages may take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import Wait
from unisono.collectives.freed_wait import run_collective, start_collective
from unisono.collectives.world import World
from unisono.plan.alignment import WIRE_NBYTES, align_up

__all__ = ["MessageExchange", "next_slot"]

_FEW_RANKS = 8
"""Up to this many ranks send messages to each other; for more, one collective is less work."""


def next_slot(slot: int, longest: int, most: int) -> int:
    """Return the length of the slots of the next exchange.

    Args:
        slot: The length of those of this one.
        longest: The length of the longest message in this one.
        most: The greatest length.

    >>> next_slot(0, 100, 4096), next_slot(4096, 100, 4096), next_slot(128, 10**6, 4096)
    (112, 3584, 4096)
    """
    return min(align_up(max(longest + longest // 8, slot - slot // 8), WIRE_NBYTES), most)


class _PostedMessages(NamedTuple):
    """An exchange that has begun."""

    messages: Sequence[Tensor]
    given: Tensor
    """What is being sent; it must stay until it is."""
    got: Tensor
    works: list[tuple[Wait | None, dist.Work]]


class MessageExchange:
    """Exchanges messages among the ranks of a group. Every rank must make it.

    Traffic: the messages to other ranks, their lengths (8 bytes for each pair of ranks, to each rank), the notes, and
    what is left free in slots.

    Args:
        world: The ranks.
        group: Their process group, on CPUs.
        most: The greatest length of a slot in bytes. It bounds what is sent in vain.
        notes: How many numbers each rank tells all others.
        tag: A tag that no other messages of the group have. With it, `expect` may be called before an exchange, and few
            ranks send each other messages.
    """

    def __init__(
        self, world: World, *, group: dist.ProcessGroup, most: int, notes: int = 0, tag: int | None = None
    ) -> None:
        self._size, self._rank, self._group, self._most, self._notes = world.size, world.rank, group, most, notes
        self._head_nbytes = align_up(8 * (notes + world.size), WIRE_NBYTES)
        self._slot = 0
        self._posted: _PostedMessages | None = None
        self._waiter, self._tag = world.waiter, tag if world.size <= _FEW_RANKS else None
        self._seen = {rank: world.wait_for(rank) for rank in range(world.size) if rank != world.rank}
        self._expected: tuple[Tensor, list[tuple[Wait | None, dist.Work]]] | None = None
        self._obstacle: RuntimeError | None = None
        """Why another exchange is not possible."""

    def expect(self) -> None:
        """Begin to receive the messages of the next exchange. Local.

        A sender waits until it has heard that the other side receives. If that was said early, the exchange takes half
        of the time between hosts.
        """
        if self._tag is not None and self._expected is None:
            got = torch.empty((self._size, self._head_nbytes + self._slot), dtype=torch.uint8)
            works: list[tuple[Wait | None, dist.Work]] = []
            self._expected = got, works
            try:
                for rank, seen in self._seen.items():
                    works.append((seen, self._group.recv([got[rank]], rank, self._tag)))
            except RuntimeError as error:  # the rank may have ended after the last exchange that there is
                self._obstacle = error

    def exchange(self, messages: Sequence[Tensor], notes: Sequence[int] = ()) -> tuple[list[list[int]], list[Tensor]]:
        """Send a message to each rank, and receive one of each. Every rank must call it; see `post` and `collect`."""
        self.post(messages, notes)
        return self.collect()

    def post(self, messages: Sequence[Tensor], notes: Sequence[int] = ()) -> None:
        """Begin to send a message to each rank. Every rank must call it, and `collect` before the next one.

        Args:
            messages: The message to each rank, [n], uint8, contiguous. If all lengths are multiples of 16, so is the
                place in memory where each begins that comes. None of them may change until `collect` has returned.
            notes: What this rank tells all ranks.
        """
        head_nbytes, slot = self._head_nbytes, self._slot
        lengths = [message.shape[0] for message in messages]
        given = torch.empty((self._size, head_nbytes + slot), dtype=torch.uint8)
        given[:, : 8 * (self._notes + self._size)] = torch.tensor([*notes, *lengths]).view(torch.uint8)
        for place, message, length in zip(given, messages, lengths, strict=True):
            if length and slot:
                place[head_nbytes : head_nbytes + length] = message[:slot]
        if self._tag is not None:
            self.expect()
            if self._obstacle is not None:
                raise self._obstacle
            assert self._expected is not None
            (got, works), self._expected = self._expected, None
            got[self._rank] = given[self._rank]
            works += [(seen, self._group.send([given[rank]], rank, self._tag)) for rank, seen in self._seen.items()]
        else:
            got = torch.empty_like(given)
            arguments = got.view(-1), given.view(-1)
            works = [(None, start_collective(dist.all_to_all_single, *arguments, group=self._group))]
        self._posted = _PostedMessages(messages, given, got, works)

    def collect(self) -> tuple[list[list[int]], list[Tensor]]:
        """Return the notes of each rank, and the message of each. Every rank must call it, after `post`."""
        assert self._posted is not None, "post comes first"
        (messages, _, got, works), self._posted = self._posted, None
        for seen, work in works:
            self._waiter.wait(work, seen)
        slot = self._slot
        heads: list[list[int]] = got[:, : 8 * (self._notes + self._size)].contiguous().view(torch.int64).tolist()
        of_all = [head[self._notes :] for head in heads]
        theirs = [of_rank[self._rank] for of_rank in of_all]
        bodies = got[:, self._head_nbytes :]
        longest = max(map(max, of_all))
        if longest > slot:
            found = self._with_rests(messages, bodies, theirs)
        else:
            found = [body[:length] for body, length in zip(bodies, theirs, strict=True)]
        self._slot = next_slot(slot, longest, self._most)
        return [head[: self._notes] for head in heads], found

    def _with_rests(self, messages: Sequence[Tensor], bodies: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Exchange what has not fitted, and return the whole messages."""
        slot = self._slot
        rests = [message[slot:] for message in messages]
        missing = [max(length - slot, 0) for length in lengths]
        received = torch.empty(sum(missing), dtype=torch.uint8)
        sent = [rest.shape[0] for rest in rests]
        run_collective(dist.all_to_all_single, received, torch.cat(rests), missing, sent, group=self._group)
        if not slot:
            return list(torch.split(received, missing))
        parts = zip(bodies, torch.split(received, missing), lengths, strict=True)
        return [torch.cat([body[:length], rest]) for body, rest, length in parts]
