"""Sending micro-batches from a worker process in few pieces of shared memory.

Each tensor that is sent alone takes a piece of shared memory and a file descriptor, which cost more than a small tensor
is worth, and the micro-batches of a step are small and many. So tensors at one place of all micro-batches, such as the
labels, travel in one piece, and no others with them: to keep the labels of a batch must not keep its images.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["PackedBatch", "pack", "unpack"]

_ALIGNMENT = 64
"""Bytes to which each tensor is aligned, as a separate tensor would be: bits of products may depend on it."""


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

    pieces: list[Tensor]
    """Bytes in shared memory."""
    micro_batches: list[Any]
    """The results of collate_fn, with slots in place of tensors."""


def pack(micro_batches: list[Any]) -> PackedBatch:
    """Copy the tensors in lists, tuples and dicts of micro-batches into pieces of shared memory.

    Tensors that are not dense, or do not own their memory alone, stay as they are.

    >>> unpack(pack([[torch.tensor([1, 2]), "a"], [torch.tensor([3]), "b"]]))
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
            sizes[place] += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            copies.append((tensor, slot))
        return slot

    skeletons = [_map(each, (), Tensor, reserve) for each in micro_batches]
    pieces = []
    for place in range(len(places)):
        storage = torch.UntypedStorage._new_shared(sizes[place])  # type: ignore[no-untyped-call]
        pieces.append(torch.empty(0, dtype=torch.uint8).set_(storage))
    for tensor, slot in copies:
        _view(pieces[slot.place], slot).copy_(tensor)
    return PackedBatch(pieces, skeletons)


def unpack(packed: PackedBatch) -> list[Any]:
    """Return the micro-batches, with tensors in the pieces of shared memory."""
    tensors: dict[tuple[int, int], Tensor] = {}

    def find(slot: _Slot, path: tuple[Any, ...]) -> Tensor:
        del path
        start = slot.place, slot.offset
        if start not in tensors:
            tensors[start] = _view(packed.pieces[slot.place], slot)
        return tensors[start]

    return [_map(each, (), _Slot, find) for each in packed.micro_batches]


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
    """Return a slot's tensor. It is not a view in autograd's sense: a write to it is not one to the others."""
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
