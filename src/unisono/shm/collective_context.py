"""What all collectives of a group share: its slots, and the check that all ranks call the same."""

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
"""A round of the slots, and the ranks that must have published it."""

Operation = Generator[Request, None, "list[Tensor] | None"]
"""Yields what it waits for. Returns the work's tensors if they were not known before."""

Prepared = tuple[Operation, CollectiveFingerprint, "list[Tensor]"]
"""A collective that has been checked and can be submitted: the operation, the call, and the tensors it fills."""

copy = ctypes.memmove
"""copy(target, source, nbytes), by addresses: quicker than torch for little; autograd sees nothing."""


class CollectiveContext:
    """The slots of a group and the calls that use them. One thread at a time may use it.

    Args: ranks are the global ranks of the group, for errors.
    """

    def __init__(self, slots: SlotRing, ranks: Sequence[int]) -> None:
        self.slots = slots
        self._calls, self._ranks = FingerprintWriter(), ranks
        self._header = b""

    @property
    def number(self) -> int:
        """How many collectives this rank has called."""
        return self._calls.number

    def write_fingerprint(self, call: CollectiveFingerprint, extra: bytes = b"") -> None:
        """Write a call into this rank's header of the coming round, which must be free. Peers can read `extra`, too."""
        self._header = header = self._calls.header(call)
        self.slots.write_header(header + extra)

    def exchange(
        self,
        call: CollectiveFingerprint,
        rounds: int,
        write: Callable[[int], None],
        read: Callable[[int, int], None] | None,
    ) -> Operation:
        """Go through rounds in which every rank writes a piece and, unless read is None, reads those of all others.

        Piece k+1 is published before piece k is read, so that no rank waits for one that only has to read.

        Args: write(k) writes piece k to the slot of the coming round; read(k, round) reads the slots of all.
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
        """Check that ranks call in a round what this rank does.

        Raises: DistBackendError, which names both sides.
        """
        common = self._header[:COMMON_NBYTES]
        for rank in ranks:
            theirs = self.slots.header(rank, round_, COMMON_NBYTES)
            if theirs != common:
                raise DistBackendError(self._difference(rank, round_))

    def own_number(self, rank: int, round_: int) -> int:
        """Read the number of a rank's call that may differ between ranks."""
        return own_number(self.slots.header(rank, round_, HEADER_NBYTES))

    def extra(self, rank: int, round_: int, nbytes: int) -> bytes:
        """Read what a rank added to its fingerprint."""
        return self.slots.header(rank, round_, HEADER_NBYTES + nbytes)[HEADER_NBYTES:]

    def name(self, rank: int) -> str:
        """Name a rank of the group, for errors."""
        return f"rank {self._ranks[rank]}"

    def _difference(self, rank: int, round_: int) -> str:
        mine, theirs = read_header(self._header), read_header(self.slots.header(rank, round_, HEADER_NBYTES))
        here, there = self.name(self.slots.rank), self.name(rank)
        if mine.number != theirs.number:
            return f"{there} is in another place than {here}, which calls {mine}. Its last call: {theirs}. {REMEDY}"
        calls = {
            self._ranks[self.slots.rank]: CallDescription(str(mine)),
            self._ranks[rank]: CallDescription(str(theirs)),
        }
        before = f"{here} and {there} both call {mine}, but they called different things before that. {REMEDY}"
        return describe_mismatch(calls) or before
