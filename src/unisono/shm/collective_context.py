"""The state that all collectives of a group share: its slots, and the check that all ranks make the same calls."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Generator, Sequence

from torch import Tensor
from torch.distributed import DistBackendError

from unisono.mismatch import REMEDY, CallDescription, describe_mismatch
from unisono.shm.fingerprint import (
    COMMON_NBYTES,
    HEADER_NBYTES,
    CollectiveFingerprint,
    FingerprintWriter,
    own_number,
    read_header,
)
from unisono.shm.slot_ring import SlotRing

__all__ = ["CollectiveContext", "Operation", "Prepared", "Request", "copy"]

Request = tuple[int, Sequence[int]]
"""A round of the slots, and the ranks that must have published it before an operation can continue."""

Operation = Generator[Request, None, "list[Tensor] | None"]
"""Yields the requests that it waits for. Returns the work's tensors if they were not known before."""

Prepared = tuple[Operation, CollectiveFingerprint, "list[Tensor]"]
"""A checked collective, ready to be submitted: the operation, the call, and the tensors that it fills."""

copy = ctypes.memmove
"""copy(target, source, nbytes), by addresses. Faster than torch for small sizes, and invisible to autograd."""


class CollectiveContext:
    """The slots of a group and the calls that use them. One thread at a time may use it.

    Args:
        slots: The slots of the group.
        ranks: The global ranks of the group, for errors.
    """

    def __init__(self, slots: SlotRing, ranks: Sequence[int]) -> None:
        self.slots = slots
        self._calls, self._ranks = FingerprintWriter(), ranks
        self._header = b""

    @property
    def number(self) -> int:
        """The number of collectives that this rank has called."""
        return self._calls.number

    def write_fingerprint(self, call: CollectiveFingerprint, extra: bytes = b"") -> None:
        """Write a call and `extra` into this rank's header of the coming round, whose slot must be free."""
        self._header = header = self._calls.header(call)
        self.slots.write_header(header + extra)

    def exchange(
        self,
        call: CollectiveFingerprint,
        rounds: int,
        write: Callable[[int], None],
        read: Callable[[int, int], None] | None,
    ) -> Operation:
        """Run rounds in which every rank writes a piece and, unless `read` is None, reads those of all others.

        Piece k+1 is published before piece k is read, so that no rank waits for one that only has to read.

        Args:
            call: The call, which is compared with those of the other ranks unless `read` is None.
            rounds: The number of pieces.
            write: Called as `write(k)`; writes piece k to the slot of the coming round.
            read: Called as `read(k, round)`; reads piece k from the slots of all ranks in a round.
        """
        slots, others = self.slots, self.slots.others
        for number in range(rounds + 1):
            if number < rounds:
                round_, late = slots.readers()
                if late:
                    yield round_, late
                if not number:
                    self.write_fingerprint(call)
                write(number)
                slots.publish()
            if number and read is not None:
                round_ = slots.round - (2 if number < rounds else 1)
                late = slots.missing(round_, others)
                if late:
                    yield round_, late
                if number == 1:
                    self.check_fingerprints(round_, others)
                read(number - 1, round_)
        return None

    def check_fingerprints(self, round_: int, ranks: Collection[int]) -> None:
        """Check that ranks make the same call in a round as this rank.

        Raises:
            DistBackendError: A rank makes a different call. The error names both sides.
        """
        common = self._header[:COMMON_NBYTES]
        for rank in ranks:
            theirs = self.slots.header(rank, round_, COMMON_NBYTES)
            if theirs != common:
                raise DistBackendError(self._difference(rank, round_))

    def own_number(self, rank: int, round_: int) -> int:
        """Return the number `own` of a rank's call, which may differ between ranks."""
        return own_number(self.slots.header(rank, round_, HEADER_NBYTES))

    def extra(self, rank: int, round_: int, nbytes: int) -> bytes:
        """Return the bytes that a rank added to its fingerprint."""
        return self.slots.header(rank, round_, HEADER_NBYTES + nbytes)[HEADER_NBYTES:]

    def name(self, rank: int) -> str:
        """Return the name of a rank of the group, for errors."""
        return f"rank {self._ranks[rank]}"

    def _difference(self, rank: int, round_: int) -> str:
        mine, theirs = read_header(self._header), read_header(self.slots.header(rank, round_, HEADER_NBYTES))
        here, there = self.name(self.slots.rank), self.name(rank)
        if mine.number != theirs.number:
            return f"{there} is at a different call than {here}, which calls {mine}. Its last call: {theirs}. {REMEDY}"
        calls = {
            self._ranks[self.slots.rank]: CallDescription(str(mine)),
            self._ranks[rank]: CallDescription(str(theirs)),
        }
        before = f"{here} and {there} both call {mine}, but they called different things before that. {REMEDY}"
        return describe_mismatch(calls) or before
