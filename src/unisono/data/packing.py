"""Sending micro-batches from a worker process in few pieces of shared memory.

Each tensor that is sent alone takes a piece of shared memory and a file descriptor, which cost more than a small tensor
is worth, and the micro-batches of a step are small and many. So tensors at one place of all micro-batches, such as the
labels, travel in one piece, and no others with them: to keep the labels of a batch must not keep its images. A small
piece travels as bytes, which is faster. Columns are cut up where they arrive.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.data.columns import COLUMN_ALIGNMENT, Columns, empty_shared

__all__ = ["PackedBatch", "pack_tensors", "unpack_tensors"]

_MOST_AS_BYTES = 32768
"""Bytes of the largest piece that is not in shared memory: half of what fits into a pipe."""


class _Slot(NamedTuple):
    """Stands for a tensor."""

    place: int
    """The number of its piece."""
    offset: int
    """In bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class PackedBatch(NamedTuple):
    """Micro-batches, ready to be sent."""

    pieces: list[Tensor | bytes]
    """Tensors of bytes in shared memory, or bytes."""
    found: list[Any] | Columns
    """The results of collate_fn, with slots in place of tensors."""


def pack_tensors(found: list[Any] | Columns, *, pinned: bool = False) -> PackedBatch:
    """Copy the tensors in lists, tuples and dicts of micro-batches, or of columns, into pieces.

    Args:
        found: The micro-batches.
        pinned: Put all pieces into shared memory, since they are to be copied into page-locked memory on arrival.

    Tensors that are not dense, or do not own their memory alone, stay as they are.

    >>> unpack_tensors(pack_tensors([[torch.tensor([1, 2]), "a"], [torch.tensor([3]), "b"]]))
    [[tensor([1, 2]), 'a'], [tensor([3]), 'b']]
    """
    places: dict[tuple[Any, ...], int] = {}
    sizes: dict[int, int] = defaultdict(int)
    slots: dict[int, _Slot] = {}
    copies: list[tuple[Tensor, _Slot]] = []

    def reserve(tensor: Tensor, path: tuple[Any, ...]) -> Any:
        slot = slots.get(id(tensor))
        if slot is None:
            if not _is_packable(tensor):
                return tensor
            place = places.setdefault(path, len(places))
            slot = slots[id(tensor)] = _Slot(place, sizes[place], tensor.dtype, tuple(tensor.shape), tensor.stride())
            sizes[place] += -(-tensor.nbytes // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT
            copies.append((tensor, slot))
        return slot

    skeletons = [_map(each, (), Tensor, reserve) for each in _trees(found)]
    buffers: dict[int, Tensor] = {}
    for tensor, slot in copies:
        if isinstance(found, Columns) and _is_shared(tensor):  # alone at its place
            buffers[slot.place] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            continue
        if slot.place not in buffers:
            nbytes = sizes[slot.place]
            as_bytes = nbytes <= _MOST_AS_BYTES and not pinned
            buffers[slot.place] = _unshared(nbytes) if as_bytes else empty_shared((nbytes,), torch.uint8)
        _view(buffers[slot.place], slot).copy_(tensor)
    pieces = [_as_sent(buffers[place]) for place in range(len(places))]
    return PackedBatch(pieces, _with_trees(found, skeletons))


def unpack_tensors(packed: PackedBatch) -> list[Any]:
    """Return the micro-batches, with tensors in the pieces of shared memory."""
    pieces = [_as_received(piece) for piece in packed.pieces]
    tensors: dict[tuple[int, int], Tensor] = {}

    def find(slot: _Slot, _: tuple[Any, ...]) -> Tensor:
        start = slot.place, slot.offset
        if start not in tensors:
            tensors[start] = _view(pieces[slot.place], slot)
        return tensors[start]

    found = _with_trees(packed.found, [_map(each, (), _Slot, find) for each in _trees(packed.found)])
    return found.parts() if isinstance(found, Columns) else found


def _trees(found: list[Any] | Columns) -> list[Any]:
    return [found.tree] if isinstance(found, Columns) else found


def _with_trees(found: list[Any] | Columns, trees: list[Any]) -> list[Any] | Columns:
    return found._replace(tree=trees[0]) if isinstance(found, Columns) else trees


def _unshared(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _is_shared(tensor: Tensor) -> bool:
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def _as_sent(piece: Tensor) -> Tensor | bytes:
    return piece if _is_shared(piece) else ctypes.string_at(piece.data_ptr(), piece.nbytes)


def _as_received(piece: Tensor | bytes) -> Tensor:
    if isinstance(piece, Tensor):
        return piece
    received = _unshared(len(piece))  # torch aligns it, Python would not
    ctypes.memmove(received.data_ptr(), piece, len(piece))
    return received


def _is_packable(tensor: Tensor) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def _view(piece: Tensor, slot: _Slot) -> Tensor:
    """Return a slot's tensor. It is no view in autograd's sense: a write to it is not one to the others."""
    empty = torch.empty(0, dtype=slot.dtype)
    return empty.set_(piece.untyped_storage(), slot.offset // empty.element_size(), slot.shape, slot.strides)


def _map(value: Any, path: tuple[Any, ...], kind: type, function: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    """Return a structure of lists, tuples and dicts with function(leaf, path) in place of leaves of a kind."""
    if isinstance(value, kind):
        return function(value, path)
    if type(value) is dict:
        return {key: _map(each, (*path, key), kind, function) for key, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(_map(each, (*path, number), kind, function) for number, each in enumerate(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_map(each, (*path, number), kind, function) for number, each in enumerate(value)))
    return value
