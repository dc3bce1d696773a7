"""Conversion between the tensors of a call and the flat ones of an operation: strided ones are copied, and copied back.

These functions run inside operations: in the order of operations, and without autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unisono.shm.collective_context import Operation, Prepared

__all__ = ["chain", "filling", "flatten", "in_place", "split_flat"]


def flatten(tensor: Tensor) -> Tensor:
    """Return a one-dimensional view of a tensor, or a copy if its elements are not contiguous and stored as they are.

    Writes to the result do not increase the version counter of the tensor: no backend of torch's does that.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor.data.contiguous().flatten()


def in_place(tensor: Tensor, operate: Callable[[Tensor], Operation], *, writes: bool = True) -> Operation:
    """Run an operation in place on a tensor of any layout. `writes` is False if it is not an output on this rank."""
    flat = flatten(tensor)
    yield from operate(flat)
    if writes:
        _put_back(flat, tensor)
    return None


def filling(outputs: Sequence[Tensor], operate: Callable[[list[Tensor]], Operation]) -> Operation:
    """Run an operation that fills tensors of any layout."""
    flats = [flatten(output) for output in outputs]
    yield from operate(flats)
    for output, flat in zip(outputs, flats, strict=True):
        _put_back(flat, output)
    return None


def _put_back(flat: Tensor, tensor: Tensor) -> None:
    if flat.data_ptr() == tensor.data_ptr():
        return
    source = flat.view(tensor.shape)
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim] > 1:  # expanded: its elements share one memory location
            source, tensor = source.narrow(dim, 0, 1), tensor.narrow(dim, 0, 1)
    tensor.data.copy_(source)


def split_flat(flat: Tensor, numels: Sequence[int]) -> list[Tensor]:
    """Split a flat tensor into pieces with the given numbers of elements."""
    return list(torch.split(flat, list(numels)))


def chain(plans: Sequence[Prepared]) -> Prepared:
    """Join collectives into one that runs them in order and has the fingerprint of the first."""
    return _one_by_one([plan[0] for plan in plans]), plans[0][1], [tensor for plan in plans for tensor in plan[2]]


def _one_by_one(operations: Sequence[Operation]) -> Operation:
    for operation in operations:
        yield from operation
    return None
