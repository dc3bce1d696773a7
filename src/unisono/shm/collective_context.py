"""What all collectives of a group share: its board, and the check that all ranks call the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Generator, Sequence

from torch import Tensor
from torch.distributed import DistBackendError

from unisono.shm.fingerprint import (
    COMMON_NBYTES,
    HEADER_NBYTES,
    CollectiveFingerprint,
    FingerprintWriter,
    own_number,
    read_header,
)
from unisono.shm.slot_ring import SlotRing

__all__ = ["CollectiveContext", "Operation", "Request", "copy"]

Request = tuple[int, Sequence[int]]
"""A round of the board, and the ranks whose posts of it are needed."""

Operation = Generator[Request, None, "list[Tensor] | None"]
"""Yields what it waits for. Returns the work's tensors if they were not known before."""

copy = ctypes.memmove
"""copy(target, source, nbytes), by addresses: quicker than torch for little; autograd sees nothing."""


class CollectiveContext:
    """The board of a group and the calls on it. One thread at a time may use it.

    Args: names gives names to ranks of the group, for errors.
    """

    def __init__(self, board: SlotRing, names: Callable[[Collection[int]], str]) -> None:
        self.board = board
        self._calls, self._names = FingerprintWriter(), names
        self._header = b""

    @property
    def number(self) -> int:
        """How many collectives this rank has called."""
        return self._calls.number

    def announce(self, call: CollectiveFingerprint, more: bytes = b"") -> None:
        """Write a call into this rank's note of the coming round, which must be free. More is for the peers to read."""
        self._header = header = self._calls.header(call)
        self.board.write_note(header + more)

    def exchange(
        self,
        call: CollectiveFingerprint,
        rounds: int,
        show: Callable[[int], None],
        take: Callable[[int, int], None] | None,
    ) -> Operation:
        """Go through rounds in which every rank shows something and, unless take is None, needs what all others show.

        Piece k+1 is shown before piece k is taken, so that nobody waits for somebody who only has to look.

        Args: show(k) writes piece k to the slot of the board's coming round; take(k, round) reads the slots of all.
        """
        board, others = self.board, self.board.others
        for number in range(rounds + 1):
            if number < rounds:
                round_, late = board.occupied()
                if late:
                    yield round_, late
                if not number:
                    self.announce(call)
                show(number)
                board.post()
            if number and take is not None:
                round_ = board.round - (2 if number < rounds else 1)
                late = board.missing(round_, others)
                if late:
                    yield round_, late
                if number == 1:
                    self.agree(round_, others)
                take(number - 1, round_)
        return None

    def agree(self, round_: int, ranks: Collection[int]) -> None:
        """Check that ranks called in a round what this rank announced last.

        Raises: DistBackendError, which names both sides.
        """
        common = self._header[:COMMON_NBYTES]
        for rank in ranks:
            theirs = self.board.note(rank, round_, COMMON_NBYTES)
            if theirs != common:
                raise DistBackendError(self._difference(rank, round_))

    def own_number(self, rank: int, round_: int) -> int:
        """Read the number of a rank's call that may differ between ranks."""
        return own_number(self.board.note(rank, round_, HEADER_NBYTES))

    def more(self, rank: int, round_: int, nbytes: int) -> bytes:
        """Read what a rank added to its announcement."""
        return self.board.note(rank, round_, HEADER_NBYTES + nbytes)[HEADER_NBYTES:]

    def name(self, rank: int) -> str:
        """Name a rank of the group, for errors."""
        return self._names([rank])

    def _difference(self, rank: int, round_: int) -> str:
        mine, theirs = read_header(self._header), read_header(self.board.note(rank, round_, HEADER_NBYTES))
        here, there = self.name(self.board.rank), self.name(rank)
        rule = "Every rank must call the same collectives in the same order, with equal sizes and types"
        if mine.number == theirs.number and str(mine) == str(theirs):
            return f"{here} and {there} both call {mine}, but they called different things before that. {rule}"
        if mine.number == theirs.number:
            return f"{there} calls {theirs} where {here} calls {mine}. {rule}"
        return f"{there} is in another place than {here}, which calls {mine}. Its last call: {theirs}. {rule}"
