"""Collectives that only move data: broadcast, gather, scatter, all_gather, all_to_all, barrier.

Each is a generator over the slots. Tensors are flat and contiguous, of any dtype: their bytes are copied. As in all
collectives, every rank publishes every round, and a slot that a rank has yet to read is not overwritten (`slot_ring`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed import DistBackendError

from unisono.shm.collective_context import CollectiveContext, Operation, copy
from unisono.shm.fingerprint import CollectiveFingerprint

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "scatter"]


def barrier(context: CollectiveContext, call: CollectiveFingerprint) -> Operation:
    """Wait until all ranks have called it."""
    return context.exchange(call, 1, lambda _: None, lambda _, __: None)


def broadcast(context: CollectiveContext, flat: Tensor, call: CollectiveFingerprint) -> Operation:
    """Send the root's tensor to all ranks."""

    def write(address: int, offset: int, count: int) -> None:
        copy(address, flat.data_ptr() + offset, count)

    return _from_root(context, flat, call, write, step=context.slots.slot_nbytes)


def _from_root(
    context: CollectiveContext,
    flat: Tensor,
    call: CollectiveFingerprint,
    write: Callable[[int, int, int], None],
    *,
    step: int,
    place: int = 0,
) -> Operation:
    """Send the root's pieces, each of `step` bytes at most, to the other ranks, which read theirs into `flat`.

    Args:
        context: The group.
        flat: This rank's tensor.
        call: The call.
        write: Called on the root for each piece with the address of its slot, and the piece's offset and bytes.
        step: Bytes of a piece.
        place: Where in a slot this rank's piece is.
    """
    slots, root = context.slots, call.root
    nbytes, start = flat.nbytes, flat.data_ptr()
    source = (root,)
    for offset in range(0, max(nbytes, 1), step):
        count = min(step, nbytes - offset)
        if slots.rank == root or not offset:
            round_, late = slots.readers()
            if late:
                yield round_, late
            if not offset:
                context.write_fingerprint(call)
        if slots.rank == root:
            write(slots.address(root, slots.round), offset, count)
            slots.publish()
            continue
        round_ = slots.round
        if not offset:
            slots.publish()  # a rank may publish before it has read
        if slots.missing(round_, source):
            yield round_, source
        if not offset:
            context.check_fingerprints(round_, source)
        copy(start + offset, slots.address(root, round_) + place, count)
        if offset:
            slots.publish()
    return None


def gather(
    context: CollectiveContext, flat: Tensor, outputs: Sequence[Tensor], call: CollectiveFingerprint
) -> Operation:
    """Send every rank's tensor to the root, where `outputs` has one tensor for each rank; elsewhere it is empty."""
    slots = context.slots
    rank, is_root = slots.rank, slots.rank == call.root
    nbytes, step = flat.nbytes, slots.slot_nbytes

    # These functions must keep the tensors alive, so they hold the tensors and get their addresses each time.
    def write(k: int) -> None:
        target = outputs[rank].data_ptr() + k * step if is_root else slots.address(rank, slots.round)
        copy(target, flat.data_ptr() + k * step, min(step, nbytes - k * step))

    def read(k: int, round_: int) -> None:
        for r in slots.others:
            copy(outputs[r].data_ptr() + k * step, slots.address(r, round_), min(step, nbytes - k * step))

    return context.exchange(call, -(-max(1, nbytes) // step), write, read if is_root else None)


def scatter(
    context: CollectiveContext, inputs: Sequence[Tensor], flat: Tensor, call: CollectiveFingerprint
) -> Operation:
    """Send each rank its tensor of the root's `inputs`, which has one for each rank; elsewhere it is empty."""
    slots = context.slots
    step = _part(slots.slot_nbytes, slots.size)

    def write(address: int, offset: int, count: int) -> None:
        for r in slots.others:
            copy(address + r * step, inputs[r].data_ptr() + offset, count)
        copy(flat.data_ptr() + offset, inputs[call.root].data_ptr() + offset, count)

    return _from_root(context, flat, call, write, step=step, place=slots.rank * step)


def all_gather(
    context: CollectiveContext, flat: Tensor, outputs: Sequence[Tensor], call: CollectiveFingerprint
) -> Operation:
    """Send every rank's tensor to all ranks.

    `outputs` has one tensor for each rank. Sizes may differ. `call.own` is the number of elements of `flat`.
    """
    slots = context.slots
    rank, others, step = slots.rank, slots.others, slots.slot_nbytes
    sizes = [output.nbytes for output in outputs]

    def write(k: int) -> None:
        offset = k * step
        count = min(step, sizes[rank] - offset)
        if count > 0:
            source, target = flat.data_ptr() + offset, outputs[rank].data_ptr() + offset
            copy(slots.address(rank, slots.round), source, count)
            if target != source:
                copy(target, source, count)

    def read(k: int, round_: int) -> None:
        if not k:
            _check_sizes(context, round_, outputs)
        offset = k * step
        for r in others:
            count = min(step, sizes[r] - offset)
            if count > 0:
                copy(outputs[r].data_ptr() + offset, slots.address(r, round_), count)

    return context.exchange(call, -(-max(1, *sizes) // step), write, read)


def _check_sizes(context: CollectiveContext, round_: int, outputs: Sequence[Tensor]) -> None:
    for r in context.slots.others:
        theirs = context.own_number(r, round_)
        if theirs != outputs[r].numel():
            raise DistBackendError(
                f"all_gather: {context.name(r)} shows {theirs} elements, {context.name(context.slots.rank)} has room "
                f"for {outputs[r].numel()} from it"
            )


def all_to_all(
    context: CollectiveContext, inputs: Sequence[Tensor], outputs: Sequence[Tensor], call: CollectiveFingerprint
) -> Operation:
    """Send rank r the r-th input of each rank.

    `inputs` and `outputs` have one tensor for each rank. Sizes may differ; output i is as large as rank i's input for
    this rank. `call.own` is set here.
    """
    slots = context.slots
    rank, others, size = slots.rank, slots.others, slots.size
    row = struct.Struct(f"<{size}q")
    sizes = [flat.nbytes for flat in inputs]
    packed, step = sum(sizes) <= slots.slot_nbytes, _part(slots.slot_nbytes, size)
    call.own = 1 if packed else -(-max(sizes) // step)

    def write(k: int) -> None:
        address, place = slots.address(rank, slots.round), 0
        for r, flat in enumerate(inputs):
            begin, end = (0, sizes[r]) if packed else (k * step, min(sizes[r], (k + 1) * step))
            if r != rank and end > begin and (not packed or not k):
                copy(address + (place if packed else r * step), flat.data_ptr() + begin, end - begin)
            place += sizes[r]

    round_, late = slots.readers()
    if late:
        yield round_, late
    context.write_fingerprint(call, row.pack(*sizes))
    write(0)
    round_ = slots.publish()
    copy(outputs[rank].data_ptr(), inputs[rank].data_ptr(), sizes[rank])
    late = slots.missing(round_, others)
    if late:
        yield round_, late
    context.check_fingerprints(round_, others)
    # Now the number of rounds is known, and where the data for this rank lies in the slots.
    rounds = max(1, call.own, *(context.own_number(r, round_) for r in others))
    places = {r: _place(context, r, round_, row, outputs[r]) for r in others}
    for k in range(1, rounds + 1):
        previous = slots.round - 1
        if k < rounds:
            round_, late = slots.readers()
            if late:
                yield round_, late
            write(k)
            slots.publish()
        late = slots.missing(previous, others)
        if late:
            yield previous, late
        for r in others:
            nbytes, (where, together) = outputs[r].nbytes, places[r]
            begin, end = (0, nbytes) if together else ((k - 1) * step, min(nbytes, k * step))
            if end > begin and (not together or k == 1):
                copy(outputs[r].data_ptr() + begin, slots.address(r, previous) + where, end - begin)
    return None


def _place(context: CollectiveContext, r: int, round_: int, row: struct.Struct, output: Tensor) -> tuple[int, bool]:
    """Return the offset in rank r's slot of its data for this rank, and True if the slot contains all of it."""
    slots, itemsize = context.slots, output.itemsize
    given = row.unpack(context.extra(r, round_, row.size))
    if given[slots.rank] != output.nbytes:
        raise DistBackendError(
            f"all_to_all: {context.name(r)} has {given[slots.rank] // itemsize} elements for "
            f"{context.name(slots.rank)}, which expects {output.numel()} from it"
        )
    if sum(given) <= slots.slot_nbytes:
        return sum(given[: slots.rank]), True
    return slots.rank * _part(slots.slot_nbytes, slots.size), False


def _part(slot_nbytes: int, size: int) -> int:
    """Return the size of each rank's part of a slot: a multiple of 16 bytes, so that no element is cut."""
    return slot_nbytes // size // 16 * 16
