"""Collectives that only move data: broadcast, gather, scatter, all_gather, all_to_all, barrier.

Each is a generator over the board. Tensors come flat and contiguous, of any type: their bytes are copied. As in all
collectives, every rank posts every round, and what a rank has not read yet cannot be overwritten (see `board`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from torch import Tensor
from torch.distributed import DistBackendError

from unisono.shm.collective_context import CollectiveContext, Operation, copy
from unisono.shm.fingerprint import CollectiveFingerprint

__all__ = ["all_gather", "all_to_all", "barrier", "broadcast", "gather", "scatter"]


def barrier(stage: CollectiveContext, call: CollectiveFingerprint) -> Operation:
    """Wait until all ranks are here."""
    return stage.exchange(call, 1, lambda _: None, lambda _, __: None)


def broadcast(stage: CollectiveContext, flat: Tensor, call: CollectiveFingerprint) -> Operation:
    """Give all ranks the root's tensor."""
    board = stage.board
    nbytes, start, root = flat.nbytes, flat.data_ptr(), call.root
    step = board.slot_nbytes
    source = (root,)
    for offset in range(0, max(nbytes, 1), step):
        count = min(step, nbytes - offset)
        if board.rank == root or not offset:
            round_, late = board.occupied()
            if late:
                yield round_, late
            if not offset:
                stage.announce(call)
        if board.rank == root:
            copy(board.address(root, board.round), start + offset, count)
            board.post()
            continue
        round_ = board.round
        if not offset:
            board.post()  # a rank may post before it has read
        if board.missing(round_, source):
            yield round_, source
        if not offset:
            stage.agree(round_, source)
        copy(start + offset, board.address(root, round_), count)
        if offset:
            board.post()
    return None


def gather(stage: CollectiveContext, flat: Tensor, outputs: Sequence[Tensor], call: CollectiveFingerprint) -> Operation:
    """Give the root every rank's tensor. Args: outputs has one tensor for each rank on the root, else none."""
    board = stage.board
    rank, is_root = board.rank, board.rank == call.root
    nbytes, step = flat.nbytes, board.slot_nbytes

    # The tensors must live as long as these functions: so it is they whose addresses are asked for, each time.
    def show(k: int) -> None:
        target = outputs[rank].data_ptr() + k * step if is_root else board.address(rank, board.round)
        copy(target, flat.data_ptr() + k * step, min(step, nbytes - k * step))

    def take(k: int, round_: int) -> None:
        for r in board.others:
            copy(outputs[r].data_ptr() + k * step, board.address(r, round_), min(step, nbytes - k * step))

    return stage.exchange(call, -(-max(1, nbytes) // step), show, take if is_root else None)


def scatter(stage: CollectiveContext, inputs: Sequence[Tensor], flat: Tensor, call: CollectiveFingerprint) -> Operation:
    """Give each rank its part of what the root has. Args: inputs has a tensor for each rank on the root, else none."""
    board = stage.board
    rank, root, others = board.rank, call.root, board.others
    nbytes, start = flat.nbytes, flat.data_ptr()
    step = _part(board.slot_nbytes, board.size)
    source = (root,)
    for offset in range(0, max(nbytes, 1), step):
        count = min(step, nbytes - offset)
        if rank == root or not offset:
            round_, late = board.occupied()
            if late:
                yield round_, late
            if not offset:
                stage.announce(call)
        if rank == root:
            address = board.address(rank, board.round)
            for r in others:
                copy(address + r * step, inputs[r].data_ptr() + offset, count)
            board.post()
            copy(start + offset, inputs[rank].data_ptr() + offset, count)
            continue
        round_ = board.round
        if not offset:
            board.post()
        if board.missing(round_, source):
            yield round_, source
        if not offset:
            stage.agree(round_, source)
        copy(start + offset, board.address(root, round_) + rank * step, count)
        if offset:
            board.post()
    return None


def all_gather(
    stage: CollectiveContext, flat: Tensor, outputs: Sequence[Tensor], call: CollectiveFingerprint
) -> Operation:
    """Give all ranks every rank's tensor.

    Args: outputs has one tensor for each rank, which may have different sizes. call.own is the number of own elements.
    """
    board = stage.board
    rank, others, step = board.rank, board.others, board.slot_nbytes
    sizes = [output.nbytes for output in outputs]

    def show(k: int) -> None:
        offset = k * step
        count = min(step, sizes[rank] - offset)
        if count > 0:
            source, target = flat.data_ptr() + offset, outputs[rank].data_ptr() + offset
            copy(board.address(rank, board.round), source, count)
            if target != source:
                copy(target, source, count)

    def take(k: int, round_: int) -> None:
        if not k:
            _check_sizes(stage, round_, outputs)
        offset = k * step
        for r in others:
            count = min(step, sizes[r] - offset)
            if count > 0:
                copy(outputs[r].data_ptr() + offset, board.address(r, round_), count)

    return stage.exchange(call, -(-max(1, *sizes) // step), show, take)


def _check_sizes(stage: CollectiveContext, round_: int, outputs: Sequence[Tensor]) -> None:
    for r in stage.board.others:
        theirs = stage.own_number(r, round_)
        if theirs != outputs[r].numel():
            raise DistBackendError(
                f"all_gather: {stage.name(r)} shows {theirs} elements, {stage.name(stage.board.rank)} has room for "
                f"{outputs[r].numel()} from it"
            )


def all_to_all(
    stage: CollectiveContext, inputs: Sequence[Tensor], outputs: Sequence[Tensor], call: CollectiveFingerprint
) -> Operation:
    """Give rank r the r-th input of each rank.

    Args: inputs and outputs have one tensor for each rank, which may have different sizes: output i as large as this
        rank's input on rank i. call.own is set here.
    """
    board = stage.board
    rank, others, size = board.rank, board.others, board.size
    row = struct.Struct(f"<{size}q")
    sizes = [flat.nbytes for flat in inputs]
    packed, step = sum(sizes) <= board.slot_nbytes, _part(board.slot_nbytes, size)
    call.own = 1 if packed else -(-max(sizes) // step)

    def show(k: int) -> None:
        address, place = board.address(rank, board.round), 0
        for r, flat in enumerate(inputs):
            begin, end = (0, sizes[r]) if packed else (k * step, min(sizes[r], (k + 1) * step))
            if r != rank and end > begin and (not packed or not k):
                copy(address + (place if packed else r * step), flat.data_ptr() + begin, end - begin)
            place += sizes[r]

    round_, late = board.occupied()
    if late:
        yield round_, late
    stage.announce(call, row.pack(*sizes))
    show(0)
    round_ = board.post()
    copy(outputs[rank].data_ptr(), inputs[rank].data_ptr(), sizes[rank])
    late = board.missing(round_, others)
    if late:
        yield round_, late
    stage.agree(round_, others)
    # How many rounds it takes, and where what is for this rank lies, is known from here on.
    rounds = max(1, call.own, *(stage.own_number(r, round_) for r in others))
    places = {r: _place(stage, r, round_, row, outputs[r]) for r in others}
    for k in range(1, rounds + 1):
        previous = board.round - 1
        if k < rounds:
            round_, late = board.occupied()
            if late:
                yield round_, late
            show(k)
            board.post()
        late = board.missing(previous, others)
        if late:
            yield previous, late
        for r in others:
            nbytes, (where, together) = outputs[r].nbytes, places[r]
            begin, end = (0, nbytes) if together else ((k - 1) * step, min(nbytes, k * step))
            if end > begin and (not together or k == 1):
                copy(outputs[r].data_ptr() + begin, board.address(r, previous) + where, end - begin)
    return None


def _place(stage: CollectiveContext, r: int, round_: int, row: struct.Struct, output: Tensor) -> tuple[int, bool]:
    """Find what rank r has for this rank in an all_to_all. Returns: its offset in the slot; whether all is there."""
    board, itemsize = stage.board, output.itemsize
    given = row.unpack(stage.more(r, round_, row.size))
    if given[board.rank] != output.nbytes:
        raise DistBackendError(
            f"all_to_all: {stage.name(r)} has {given[board.rank] // itemsize} elements for {stage.name(board.rank)}, "
            f"which expects {output.numel()} from it"
        )
    if sum(given) <= board.slot_nbytes:
        return sum(given[: board.rank]), True
    return board.rank * _part(board.slot_nbytes, board.size), False


def _part(slot_nbytes: int, size: int) -> int:
    """Divide a slot into parts for each rank, at multiples of 16 bytes, so that no element is cut."""
    return slot_nbytes // size // 16 * 16
