"""Collectives that combine values: all_reduce, reduce, reduce_scatter.

Each is a generator over the slots. Tensors are flat and contiguous. Every rank publishes its values piece by piece, and
a rank that needs a piece combines those of all ranks in their order. In an all_reduce all ranks combine everything,
unless there are many ranks and several pieces (`divided_all_reduce`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.coo_tensor import make_coo
from unisono.shm.arithmetic import Arithmetic, arithmetic
from unisono.shm.collective_context import CollectiveContext, Operation, copy
from unisono.shm.data_movement import all_gather
from unisono.shm.divided_all_reduce import divided_all_reduce, is_quicker
from unisono.shm.fingerprint import CollectiveFingerprint
from unisono.shm.slot_ring import SlotRing

__all__ = ["all_reduce", "all_reduce_coalesced", "all_reduce_sparse", "reduce", "reduce_scatter"]

_TOGETHER_NBYTES = 4 * 1024 * 1024
"""Tensors of an all_reduce_coalesced travel as one if their total size is at most this."""


def all_reduce(context: CollectiveContext, flat: Tensor, call: CollectiveFingerprint, combine: Arithmetic) -> Operation:
    """Combine a tensor over all ranks, in place."""
    if flat.numel() * flat.itemsize <= context.slots.slot_nbytes:
        return _at_once(context, flat, call, combine)
    if is_quicker(context.slots, flat.itemsize):
        return divided_all_reduce(context, flat, call, combine)
    return _reduce(context, flat, call, combine, everywhere=True)


def reduce(context: CollectiveContext, flat: Tensor, call: CollectiveFingerprint, combine: Arithmetic) -> Operation:
    """Combine a tensor over all ranks, in place on the root; the others keep theirs."""
    return _reduce(context, flat, call, combine, everywhere=False)


def _at_once(context: CollectiveContext, flat: Tensor, call: CollectiveFingerprint, combine: Arithmetic) -> Operation:
    """All-reduce a tensor that fits into a slot, in one round. The result is that of `_reduce`, in half the time."""
    slots, rank = context.slots, context.slots.rank
    round_, late = slots.readers()
    if late:
        yield round_, late
    context.write_fingerprint(call)
    copy(slots.address(rank, slots.round), flat.data_ptr(), flat.numel() * flat.itemsize)
    round_ = slots.publish()
    late = slots.missing(round_, slots.others)
    if late:
        yield round_, late
    context.check_fingerprints(round_, slots.others)
    combine(_sources(slots, round_, flat), flat)
    return None


def _reduce(
    context: CollectiveContext, flat: Tensor, call: CollectiveFingerprint, combine: Arithmetic, *, everywhere: bool
) -> Operation:
    slots, itemsize = context.slots, flat.itemsize
    rank = slots.rank
    step = slots.slot_nbytes // itemsize
    pieces = [flat] if flat.numel() <= step else list(torch.split(flat, step))

    def write(k: int) -> None:
        # No other rank reads the root's values. It needs them in its slot only if it is not one of the first two ranks.
        if everywhere or call.root != rank or rank > 1:
            piece = pieces[k]
            copy(slots.address(rank, slots.round), piece.data_ptr(), piece.numel() * itemsize)

    def read(k: int, round_: int) -> None:
        combine(_sources(slots, round_, pieces[k]), pieces[k])

    return context.exchange(call, len(pieces), write, read if everywhere or call.root == rank else None)


def _sources(slots: SlotRing, round_: int, piece: Tensor) -> list[Tensor]:
    """Return the values of all ranks for a piece, in their order."""
    count, dtype = piece.numel(), piece.dtype
    # A rank from 2 on uses its slot, not the piece: combining writes to the piece after the first two.
    return [piece if r == slots.rank and r < 2 else slots.slot(r, round_, dtype)[:count] for r in range(slots.size)]


def all_reduce_coalesced(context: CollectiveContext, flats: Sequence[Tensor], op: str) -> Operation:
    """Combine several tensors over all ranks, in place."""
    total = sum(flat.numel() for flat in flats)
    alike = len({flat.dtype for flat in flats}) == 1
    if len(flats) > 1 and alike and total * flats[0].itemsize <= _TOGETHER_NBYTES:
        together = torch.cat(list(flats))
        yield from _reduce_one(context, together, op)
        for flat, part in zip(flats, torch.split(together, [flat.numel() for flat in flats]), strict=True):
            flat.copy_(part)
        return None
    for flat in flats:
        yield from _reduce_one(context, flat, op)
    return None


def _reduce_one(context: CollectiveContext, flat: Tensor, op: str) -> Operation:
    call = CollectiveFingerprint("all_reduce", flat.dtype, flat.numel(), op)
    return all_reduce(context, flat, call, arithmetic(op, flat.dtype, context.slots.size))


def all_reduce_sparse(context: CollectiveContext, tensor: Tensor) -> Operation:
    """Sum a sparse tensor over all ranks, by an all_gather of its indices and values. Return the coalesced sum.

    `tensor` is in COO layout, coalesced or not, with the same shape on all ranks.
    """
    slots = context.slots
    own = tensor if tensor.is_coalesced() else tensor.coalesce()
    indices, values = own._indices().contiguous(), own._values().contiguous()
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(slots.size)]
    call = CollectiveFingerprint("sparse all_reduce", values.dtype, tensor.numel(), "SUM", own=1)
    yield from all_gather(context, torch.tensor([own._nnz()]), counts, call)
    nnz = [int(count) for count in counts]
    all_indices = [torch.empty((tensor.sparse_dim(), n), dtype=torch.int64) for n in nnz]
    all_values = [torch.empty((n, *values.shape[1:]), dtype=values.dtype) for n in nnz]
    for mine, parts in ((indices, all_indices), (values, all_values)):
        flats = [part.view(-1) for part in parts]
        gather = CollectiveFingerprint("all_gather", mine.dtype, sum(flat.numel() for flat in flats), own=mine.numel())
        yield from all_gather(context, mine.view(-1), flats, gather)
    with torch.inference_mode(mode=False):
        total: Tensor | None = None
        for i, v in zip(all_indices, all_values, strict=True):
            # Normal tensors, not inference tensors, because the user's autograd may see the result.
            part = make_coo(i.clone(), v.clone(), tensor.shape)
            total = part if total is None else total + part
        assert total is not None
        return [total.coalesce()]


def reduce_scatter(
    context: CollectiveContext,
    inputs: Sequence[Tensor],
    output: Tensor,
    call: CollectiveFingerprint,
    combine: Arithmetic,
) -> Operation:
    """Combine the r-th of each rank's inputs on rank r, for all r.

    `inputs` has one flat tensor for each rank; the r-th has the same number of elements on all ranks. `output` has the
    size of this rank's tensor among them, and may be that tensor.
    """
    slots, dtype, itemsize = context.slots, output.dtype, output.itemsize
    rank, size = slots.rank, slots.size
    numels = [flat.numel() for flat in inputs]
    slot = slots.slot_nbytes // itemsize
    if sum(numels) <= slot:  # everything at once
        step = max(1, *numels)
        offsets = [sum(numels[:r]) for r in range(size)]
    else:
        step = _part(slot, size)
        offsets = [step * r for r in range(size)]
    own = inputs[rank]

    def write(k: int) -> None:
        address, start = slots.address(rank, slots.round), k * step
        for r in slots.others:
            count = min(step, numels[r] - start)
            if count > 0:
                copy(address + offsets[r] * itemsize, inputs[r].data_ptr() + start * itemsize, count * itemsize)

    def read(k: int, round_: int) -> None:
        start, begin = k * step, offsets[rank]
        count = min(step, numels[rank] - start)
        if count > 0:
            sources = [slots.slot(r, round_, dtype)[begin : begin + count] for r in range(size)]
            piece, out = own[start : start + count], output[start : start + count]
            if rank < 2 or piece.data_ptr() != out.data_ptr():
                sources[rank] = piece
            else:
                sources[rank].copy_(piece)  # combining writes to `out` after the first two
            combine(sources, out)

    return context.exchange(call, -(-max(1, *numels) // step), write, read)


def _part(slot: int, size: int) -> int:
    """Return the size of each rank's part of a slot, in elements: whole cache lines if it is large enough."""
    part = slot // size
    return part // 64 * 64 if part >= 64 else part
