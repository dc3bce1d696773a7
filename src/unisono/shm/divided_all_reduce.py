"""An all_reduce for many ranks that divides the additions: each rank sums its share of a piece, and all read the sums.

With few ranks it is faster if each sums everything (`reduce_algorithms`). The traffic of a rank does not grow with the
number of ranks here. Sums are published in the rounds of later pieces, so a piece costs one round here, too. Additions
are those of `reduce_algorithms`, in the order of ranks, so the bits are the same.
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
"""With three ranks it takes longer. Time saved on two cores, from 1 MB on: 10 % with 4 ranks, 25 % with 8."""
_ALIGNMENT = 64
"""In elements. Shares are multiples of it, and so whole cache lines."""

_LAG = 2
"""The number of rounds between a piece and its sums. With one round, ranks wait for each other more often."""


def is_quicker(slots: SlotRing, itemsize: int) -> bool:
    """Return True if it is faster to divide the additions of a tensor that does not fit into a slot."""
    return slots.size >= _LEAST_RANKS and _share(slots, itemsize) > 0


def divided_all_reduce(
    context: CollectiveContext, flat: Tensor, call: CollectiveFingerprint, combine: Arithmetic
) -> Operation:
    """Combine a tensor over all ranks, in place.

    A slot contains a piece and, behind it, the sums of a share of an earlier piece. Round n of the call carries piece n
    and each rank's sums of piece n - _LAG. A rank has read round n before it publishes round n + 3, as `slot_ring`
    requires.
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
    """Return the number of elements of a piece that each rank sums. A slot holds a piece and one share."""
    return slots.slot_nbytes // itemsize // (slots.size + 1) // _ALIGNMENT * _ALIGNMENT


def _share_of(piece: Tensor, rank: int, share: int) -> int:
    """Return the number of elements that a rank sums of a piece; the last piece may be shorter."""
    return max(0, min(share, piece.numel() - rank * share))
