"""An all_reduce of many ranks that divides the additions: each rank sums its share of a piece, and all read the sums.

With few ranks it is quicker to have each sum everything (`reduce_algorithms`). What a rank moves here does not grow
with the number of ranks. Sums are published in the rounds in which later pieces are, so a piece costs one round here,
too. Additions are those of `reduce_algorithms`, in the order of ranks, and so are the bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.shm.arithmetic import Arithmetic
from unisono.shm.collective_context import CollectiveContext, Operation, copy
from unisono.shm.fingerprint import CollectiveFingerprint
from unisono.shm.slot_ring import SlotRing

__all__ = ["divided_all_reduce", "is_quicker"]

_LEAST_RANKS = 4
"""With three ranks it takes longer. On two cores, time saved from 1 MB on: 10 % with 4 ranks, 25 % with 8."""
_ALIGNMENT = 64
"""Elements. Shares are multiples of it, and so whole cache lines."""

_LAG = 2
"""The sums of a piece come so many rounds after it: with one round, ranks wait for each other more often."""


def is_quicker(slots: SlotRing, itemsize: int) -> bool:
    """True if the additions of what does not fit into a slot are to be divided."""
    return slots.size >= _LEAST_RANKS and _share(slots, itemsize) > 0


def divided_all_reduce(
    context: CollectiveContext, flat: Tensor, call: CollectiveFingerprint, combine: Arithmetic
) -> Operation:
    """Combine a tensor over all ranks, in place.

    A slot holds a piece and, behind it, the sums of a share of an earlier piece. Round n of the call carries piece n,
    and each rank's sums of piece n - _LAG. A rank has read a round before it publishes the one after the next two, as
    `slot_ring` demands.
    """
    slots, dtype, itemsize = context.slots, flat.dtype, flat.itemsize
    rank, size = slots.rank, slots.size
    share = _share(slots, itemsize)
    step = size * share
    pieces = torch.split(flat, step)
    first, rounds = slots.round, len(pieces) + _LAG
    for number in range(rounds + _LAG):
        read_round = first + number - _LAG
        if number < rounds:
            round_, late = slots.readers()
            if late:
                yield round_, late
            if not number:
                context.write_fingerprint(call)
            if number < len(pieces):
                copy(slots.address(rank, slots.round), pieces[number].data_ptr(), pieces[number].numel() * itemsize)
        if number >= _LAG:
            late = slots.missing(read_round, slots.others)
            if late:
                yield read_round, late
            if number == _LAG:
                context.check_fingerprints(read_round, slots.others)
        if number < rounds:
            if number >= _LAG:
                begin, count = rank * share, _share_of(pieces[number - _LAG], rank, share)
                sources = [slots.slot(r, read_round, dtype)[begin : begin + count] for r in range(size)]
                combine(sources, slots.slot(rank, slots.round, dtype)[step : step + count])
            slots.publish()
        if number >= 2 * _LAG:
            piece = pieces[number - 2 * _LAG]
            for r in range(size):
                sums = slots.address(r, read_round) + step * itemsize
                copy(piece.data_ptr() + r * share * itemsize, sums, _share_of(piece, r, share) * itemsize)
    return None


def _share(slots: SlotRing, itemsize: int) -> int:
    """Return how many elements of a piece each rank sums: pieces are so long that a slot has room for a share more."""
    return slots.slot_nbytes // itemsize // (slots.size + 1) // _ALIGNMENT * _ALIGNMENT


def _share_of(piece: Tensor, rank: int, share: int) -> int:
    """Count the elements that a rank sums of a piece, which is shorter than others if it is the last one."""
    return max(0, min(share, piece.numel() - rank * share))
