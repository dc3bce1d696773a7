"""Collectives of one tensor each, of equal shape on all ranks, directly through torch.distributed.

Each returns a new tensor on the device of its argument, without autograd, which `collectives.differentiable` adds.
Types that a backend does not add and devices that it does not support are converted here. `src` and `dst` are numbers
within the group. Every rank of the group must call these functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.group import Group
from unisono.collectives.reduce_ops import BITWISE, WIRE_OPS, OpName, carrier_of, combine_tensors, load, unload
from unisono.collectives.serialization import bytes_of

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"]

# Torch 2.13 renamed them.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_REDUCE_SCATTER = "reduce_scatter with op {!r}"
_ALL_GATHER = ("all_gather with uniform=True", None)
_ALL_TO_ALL = ("all_to_all with uniform=True", None)


def all_reduce(group: Group, tensor: Tensor, op: OpName) -> Tensor:
    """Combine the tensors of all ranks."""
    wire = _loaded(group, tensor, op)
    if group.reference is not None:
        if _must_gather(group, wire, op):
            wire = combine_tensors(all_gather(group, wire), op)
        else:
            group.run(("all_reduce with op {!r}", op), tensor, dist.all_reduce, wire, WIRE_OPS[op])
    return _unloaded(group, wire, tensor, op)


def reduce(group: Group, tensor: Tensor, op: OpName, dst: int) -> Tensor | None:
    """Combine the tensors of all ranks on one of them; return None on the others."""
    wire = _loaded(group, tensor, op)
    if group.process_group is not None:
        if _must_gather(group, wire, op):
            parts = gather(group, wire, dst)
            wire = wire if parts is None else combine_tensors(parts, op)
        else:
            root = group.ranks[dst]
            group.run((f"reduce to rank {root} with op {{!r}}", op), tensor, dist.reduce, wire, root, WIRE_OPS[op])
    return _unloaded(group, wire, tensor, op) if group.rank == dst else None


def reduce_scatter(group: Group, tensor: Tensor, op: OpName) -> Tensor:
    """Combine the tensors of all ranks, and return this rank's part of the first dimension. Parts are equal."""
    if group.process_group is None:
        return _unloaded(group, _loaded(group, tensor, op), tensor, op)
    length = tensor.shape[0] // group.size
    wire = _loaded(group, tensor, op, copies=False)
    if _must_gather(group, wire, op):
        part = combine_tensors(all_to_all(group, wire), op)
    elif group.late_check is not None and wire.is_cpu:
        # As gloo does it itself, in a call that cannot be waited for in slices.
        if wire.data_ptr() == tensor.data_ptr():
            wire = wire.clone()
        group.run((_REDUCE_SCATTER, op), tensor, dist.all_reduce, wire, WIRE_OPS[op])
        part = wire[group.rank * length : (group.rank + 1) * length].clone()
    else:
        part = wire.new_empty((length, *wire.shape[1:]))
        group.run((_REDUCE_SCATTER, op), tensor, _reduce_scatter_single, part, wire, WIRE_OPS[op])
    return _unloaded(group, part, tensor, op)


def all_gather(group: Group, tensor: Tensor) -> list[Tensor]:
    """Return the tensors of all ranks."""
    wire = _wired(group, tensor)
    if group.process_group is None:
        return [wire.clone()]
    if not _moves(wire):
        parts = all_gather(group, bytes_of(wire))
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]
    outs = [torch.empty_like(wire) for _ in range(group.size)]
    group.run(_ALL_GATHER, tensor, dist.all_gather, outs, wire)
    return _home(outs, tensor)


def all_gather_flat(group: Group, tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension."""
    wire = _wired(group, tensor)
    if group.process_group is None:
        return wire.clone()
    if not _moves(wire):
        return torch.cat(all_gather(group, tensor))
    out = wire.new_empty((group.size * wire.shape[0], *wire.shape[1:]))
    group.run(_ALL_GATHER, tensor, all_gather_single, out, wire)
    return out.to(tensor.device)


def gather(group: Group, tensor: Tensor, dst: int) -> list[Tensor] | None:
    """Return the tensors of all ranks on one of them; None on the others."""
    wire = _wired(group, tensor)
    if group.process_group is None:
        return [wire.clone()]
    if not _moves(wire):
        parts = gather(group, bytes_of(wire), dst)
        return None if parts is None else [part.view(tensor.dtype).view(tensor.shape) for part in parts]
    outs = [torch.empty_like(wire) for _ in range(group.size)] if group.rank == dst else None
    root = group.ranks[dst]
    group.run(("gather to rank {!r} with uniform=True", root), tensor, dist.gather, wire, outs, dst=root)
    return None if outs is None else _home(outs, tensor)


def broadcast(group: Group, tensor: Tensor, src: int) -> Tensor:
    """Return the tensor of one rank on all. `tensor` has its shape and type everywhere, and the result's device."""
    wire = _wired(group, tensor) if group.rank == src else _room(group, tensor)
    if group.process_group is None:
        return wire.clone()
    root, moved = group.ranks[src], wire if _moves(wire) else bytes_of(wire)
    group.run(("broadcast from rank {!r} with uniform=True", root), tensor, dist.broadcast, moved, root)
    return wire.clone() if wire is tensor or wire.data_ptr() == tensor.data_ptr() else wire.to(tensor.device)


def scatter(group: Group, tensors: Sequence[Tensor] | None, like: Tensor, src: int) -> Tensor:
    """Return on each rank its tensor from one rank. `like` has its shape and type, and the result's device."""
    if group.process_group is None:
        assert tensors is not None
        return _wired(group, tensors[0]).clone()
    out = _room(group, like)
    wires = None if tensors is None else [_wired(group, tensor) for tensor in tensors]
    moved = out
    if not _moves(out):
        moved = bytes_of(out)
        wires = None if wires is None else [bytes_of(wire) for wire in wires]
    root = group.ranks[src]
    group.run(("scatter from rank {!r} with uniform=True", root), like, dist.scatter, moved, wires, src=root)
    return out.to(like.device)


def all_to_all(group: Group, tensor: Tensor) -> list[Tensor]:
    """Send the r-th of the equal parts along the first dimension to rank r, and return the parts received."""
    lengths = [tensor.shape[0] // group.size] * group.size
    return list(torch.split(all_to_all_flat(group, tensor, lengths, lengths), lengths))


def all_to_all_flat(group: Group, tensor: Tensor, leaving: Sequence[int], coming: Sequence[int]) -> Tensor:
    """Send the r-th part along the first dimension to rank r, and return the parts received, concatenated.

    Args:
        group: The group.
        tensor: The parts.
        leaving: The lengths of the parts to each rank.
        coming: The lengths of the parts from each rank.
    """
    wire = _wired(group, tensor)
    if group.process_group is None:
        return wire.clone()
    out = wire.new_empty((sum(coming), *wire.shape[1:]))
    if _moves(wire):
        group.run(_ALL_TO_ALL, tensor, dist.all_to_all_single, out, wire, list(coming), list(leaving))
    else:
        width = math.prod(wire.shape[1:]) * wire.element_size()
        sizes = [n * width for n in coming], [n * width for n in leaving]
        group.run(_ALL_TO_ALL, tensor, dist.all_to_all_single, bytes_of(out), bytes_of(wire), *sizes)
    return out.to(tensor.device)


# gloo does not gather complex numbers, and other backends lack other types.
_MOVED = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64,
        torch.bool,
    }
)  # fmt: skip


def _moves(wire: Tensor) -> bool:
    """Return True if every backend moves tensors of this type as they are; others travel as bytes."""
    return wire.dtype in _MOVED


def _must_gather(group: Group, wire: Tensor, op: OpName) -> bool:
    """Return True if the backend cannot combine such tensors, so that ranks must gather and combine them."""
    if wire.is_complex():
        return op == "product"
    return op in BITWISE and group.backends.get(wire.device.type) not in ("gloo", "shm", "mpi")


def _wired(group: Group, tensor: Tensor) -> Tensor:
    """Return a tensor as it can travel: contiguous, on a device that the backend supports."""
    wire = tensor.detach()
    device = group.device_for(wire)
    if wire.device != device:
        wire = wire.to(device)
    if wire.is_conj() or wire.is_neg():
        wire = wire.resolve_conj().resolve_neg()
    return wire if wire.is_contiguous() else wire.contiguous()


def _room(group: Group, like: Tensor) -> Tensor:
    """Return an empty tensor of the shape and type of `like`, on the device on which it travels."""
    device = group.device_for(like)
    if like.device == device and type(like) is Tensor and like.layout == torch.strided:  # takes a quarter of the time
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _loaded(group: Group, tensor: Tensor, op: OpName, *, copies: bool = True) -> Tensor:
    """Return a tensor as it can be combined; with `copies`, one that may be written to."""
    wire = tensor.detach()
    if wire.layout != torch.strided:
        return wire.clone()
    carrier = carrier_of(wire.dtype, op)
    if carrier is not wire.dtype:
        wire = load(wire, carrier, op)
    device = group.device_for(wire)
    if device != wire.device:
        wire = wire.to(device)
    if wire.is_complex() or wire.is_neg():
        wire = wire.resolve_conj().resolve_neg()
    if not wire.is_contiguous():
        wire = wire.contiguous()
    if copies and wire.data_ptr() == tensor.data_ptr():
        wire = wire.clone()
    if op == "mean" and wire.dtype == torch.float16:
        wire = wire / group.size  # before the sum, which might overflow
    return wire


def _unloaded(group: Group, wire: Tensor, tensor: Tensor, op: OpName) -> Tensor:
    """Return the result from the combined tensor: divided for a mean, in its own type, on its own device."""
    if op == "mean" and wire.dtype != torch.float16:
        wire = wire / group.size if wire.layout != torch.strided else wire.div_(group.size)
    if wire.dtype is not tensor.dtype:
        wire = unload(wire, tensor.dtype, op)
    return wire if wire.device == tensor.device else wire.to(tensor.device)


def _home(tensors: Sequence[Tensor], like: Tensor) -> list[Tensor]:
    return [tensor.to(like.device) for tensor in tensors]
