"""Collectives that combine the values of all ranks into one: sum, mean, min, max and so on.

A tensor alone goes directly to torch. For any other value, ranks first compare its structure in one small exchange,
which carries Python numbers too, so that structures that differ are an error on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unisono.collectives import differentiable as followed
from unisono.collectives import object_transport, tensor_collectives
from unisono.collectives.argument_checks import GroupArgument, check_one_for_each, check_parts, follows
from unisono.collectives.call_description import describe, kinds_of
from unisono.collectives.discarded import warn_if_dropped
from unisono.collectives.group import Group, group_of
from unisono.collectives.object_transport import FailedSend, Outgoing
from unisono.collectives.received import check_grad_modes
from unisono.collectives.reduce_ops import BITWISE, Op, OpName, check_dtype, combine_numbers, read_op
from unisono.collectives.serialization import serialize
from unisono.collectives.structure import Leaf, Parts, compare, signature, take_apart
from unisono.errors import RankMismatchError

__all__ = ["all_reduce", "reduce", "reduce_scatter"]


def all_reduce(value: Any, op: Op = "sum", *, group: GroupArgument = None) -> Any:
    """Combine the values of all ranks on every rank. Every rank of the group must call it.

    Differentiable: each rank gets the sum of the gradients of all ranks, by another all-reduce (for "min" and "max" by
    two, for "product" by an all-gather of the tensors in addition).

    Traffic: a tensor alone takes one all-reduce of its elements (bool as uint8, or int64 for "sum" and "product"; int16
    and uint16 as int32; uint32 as int64). A complex product takes an all-gather instead, and so does a bitwise
    operation over a backend without it, such as nccl. A structure takes an `all_gather` of a digest and its numbers,
    then the same as a tensor for one vector per dtype. Memory: the result and, on the way, at most one more copy of the
    tensors; with an all-gather, the tensors of all ranks.

    Args:
        value: A tensor, a number or None, or a dict, list, tuple or dataclass of these at any depth. Its structure must
            be equal on all ranks.
        op: "sum", "mean", "min", "max", "product", "band", "bor", "bxor", or torch's ReduceOp.
        group: The ranks that take part; None is the whole job.

    Returns:
        The same structure with new tensors of the same types, on their devices. Numbers are Python numbers: whole ones
        exact, of any size; a sum of floats is rounded once. A sum or product of bool counts, and is int64 in a tensor.

    Raises:
        TypeError: The value or its type cannot be combined by the operation.
        ValueError: The operation is unknown.
        PeerError: The value of another rank is not a single tensor and cannot be combined.
        RankMismatchError: Operations, structures, shapes or types differ, or some ranks require gradients and others
            are in no_grad mode; the message says where. Tensors passed alone are compared in check mode, and over gloo
            by type and number of elements if the call takes longer than a second.
        GroupError: As all collectives; see `unisono.comm`.
    """
    members = group_of(group)
    if len(members.ranks) > 1:
        warn_if_dropped("comm.all_reduce")
    if isinstance(value, Tensor):
        name = _checked_op(members, "all_reduce", value, op)
        module = followed if follows(value) else tensor_collectives
        return module.all_reduce(members, value, name)
    agreed = _agree(members, f"all_reduce with op {_written(op)}", [value], op)
    module = followed if agreed.follows else tensor_collectives
    return agreed.build(0, [module.all_reduce(members, flat, agreed.op) for flat in agreed.flats(0)])


def reduce(
    value: Any, dst: int = 0, op: Op = "sum", *, differentiable: bool = False, group: GroupArgument = None
) -> Any:
    """Combine the values of all ranks on one of them. Every rank of the group must call it.

    Traffic and memory are as for `all_reduce`, with a reduce to dst instead of each all-reduce and a gather to dst
    instead of each all-gather of tensors. If gradients are required, operations other than "sum" and "mean" still take
    an all-reduce. The backward is a broadcast of the gradient from dst, plus the same extras as that of `all_reduce`.

    Args:
        value: As for `all_reduce`.
        dst: The rank that receives the result.
        op: As for `all_reduce`.
        differentiable: True to propagate gradients from dst to the other ranks. Those then receive a zero instead of
            None, which they add to their loss, so that their backward waits for it. False detaches the result.
        group: The ranks that take part; None is the whole job.

    Returns:
        On dst, the result of `all_reduce`; None elsewhere.

    Raises:
        TypeError, ValueError, PeerError, RankMismatchError, GroupError: As `all_reduce`; ValueError also if dst is not
            in the group.
    """
    members = group_of(group)
    if isinstance(value, Tensor):
        root = members.index_of(dst, "dst")
        name = _checked_op(members, f"reduce to rank {dst}", value, op)
        module = followed if differentiable and torch.is_grad_enabled() else tensor_collectives
        return module.reduce(members, value, name, root)
    agreed = _agree(members, f"reduce to rank {dst} with op {_written(op)}", [value], op, dst=dst)
    root, name = members.index_of(dst, "dst"), agreed.op
    if differentiable and agreed.follows:
        results: list[Any] = [followed.reduce(members, flat, name, root) for flat in agreed.flats(0)]
        if members.rank != root:
            return torch.stack(results).sum() if results else torch.zeros(())
    else:
        results = [tensor_collectives.reduce(members, flat, name, root) for flat in agreed.flats(0)]
    return agreed.build(0, results) if members.rank == root else None


def reduce_scatter(values: Sequence[Any] | Tensor, op: Op = "sum", *, group: GroupArgument = None) -> Any:
    """Combine the values of all ranks, and return its part on each. Every rank of the group must call it.

    Differentiable: each rank gets the gradients of all parts, for "sum" and "mean" by an all-gather, otherwise as in
    `all_reduce`.

    Traffic: a tensor takes one reduce-scatter; over gloo, and with a gradient for operations other than "sum" and
    "mean", an all-reduce of the whole tensor; where `all_reduce` needs an all-gather, an all-to-all. A list takes an
    exchange as in `all_reduce`, then the same as a tensor for one vector per dtype, or an all-reduce if its values
    differ in size. Memory: this rank's part and, on the way, up to one copy of the tensor; for a list, up to three
    copies of its tensors.

    Args:
        values: A tensor, which is cut along its first dimension into equal parts; or a list with one value for each
            rank, in the order of the group. The r-th values of all ranks must have the same structure.
        op: As for `all_reduce`.
        group: The ranks that take part; None is the whole job.

    Returns:
        On the r-th rank of the group, the result of `all_reduce` for the r-th values.

    Raises:
        TypeError, ValueError, PeerError, RankMismatchError, GroupError: As `all_reduce`; ValueError also if the values
            cannot be divided among the ranks.
    """
    members = group_of(group)
    if isinstance(values, Tensor):
        check_parts(values, members.size)
        name = _checked_op(members, "reduce_scatter", values, op)
        module = followed if follows(values) else tensor_collectives
        return module.reduce_scatter(members, values, name)
    agreed = _agree(members, f"reduce_scatter with op {_written(op)}", values, op, one_for_each=True)
    name = agreed.op
    module = followed if agreed.follows else tensor_collectives
    results = []
    for parts in zip(*(agreed.flats(index) for index in range(members.size)), strict=True):
        sizes = [part.numel() for part in parts]
        if len(set(sizes)) == 1:
            results.append(module.reduce_scatter(members, torch.cat(parts), name))
        else:  # not every backend divides unequally
            results.append(module.all_reduce(members, torch.cat(parts), name).split(sizes)[members.rank])
    return agreed.build(members.rank, results)


def _checked_op(group: Group, call: str, tensor: Tensor, op: Op) -> OpName:
    """Return the name of the operation on a tensor; in check mode, compare it and the tensor between ranks."""
    name = read_op(op)
    check_dtype(tensor.dtype, name, "the tensor")
    if group.check is not None:
        group.check.compare(f"{call} with op {name!r}", kinds_of(tensor))
    return name


@dataclass(frozen=True, slots=True)
class _Agreed:
    """Values whose structure is known to be equal on all ranks."""

    group: Group
    op: OpName
    parts: list[Parts]
    numbers: list[list[int | float]]
    """The numbers of each rank, over all parts."""
    follows: bool
    """True if some rank requires gradients."""
    accelerated: bool
    """True if some rank has a tensor that is not on the CPU."""

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the tensors, in an order that is the same on all ranks."""
        found = {leaf.value.dtype for part in self.parts for leaf in part.leaves if isinstance(leaf.value, Tensor)}
        return sorted(found, key=str)

    def flats(self, part: int) -> list[Tensor]:
        """Return the tensors of a part as one vector for each dtype."""
        found = [leaf.value for leaf in self.parts[part].leaves if isinstance(leaf.value, Tensor)]
        return [self._flat([tensor for tensor in found if tensor.dtype == dtype], dtype) for dtype in self.dtypes]

    def build(self, part: int, flats: Sequence[Tensor]) -> Any:
        """Return a part with the results of its vectors."""
        pieces = dict(zip(self.dtypes, flats, strict=True))
        starts = dict.fromkeys(pieces, 0)
        before = sum(_is_number(leaf) for its in self.parts[:part] for leaf in its.leaves)
        columns = iter(list(zip(*self.numbers, strict=True))[before:])
        results: list[Any] = []
        for _, value in self.parts[part].leaves:
            if isinstance(value, Tensor):
                start = starts[value.dtype]
                starts[value.dtype] = end = start + value.numel()
                # A copy: a view would keep the others in memory, and torch.save would write them.
                results.append(pieces[value.dtype][start:end].clone().reshape(value.shape).to(value.device))
            else:
                results.append(None if value is None else combine_numbers(next(columns), self.op))
        return self.parts[part].build(results)

    def _flat(self, those: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        device = self.group.bytes_device(accelerated=self.accelerated)
        if not those:
            return torch.empty(0, dtype=dtype, device=device)
        flat = torch.cat([(t if self.follows else t.detach()).to(device).reshape(-1) for t in those])
        if self.follows and not flat.requires_grad and (flat.is_floating_point() or flat.is_complex()):
            return flat.requires_grad_()  # the backward of the others waits for this rank's
        return flat


def _agree(
    group: Group, call: str, values: Any, op: Op, *, dst: int | None = None, one_for_each: bool = False
) -> _Agreed:
    """Compare the structure of this rank's values with those of the other ranks.

    This also checks the other arguments, so that the other ranks learn of a wrong one.

    Raises:
        TypeError, ValueError: The values cannot be combined, or an argument is wrong.
        PeerError: Another rank has raised one of these.
        RankMismatchError: The structures differ, or gradients are required on some ranks and not possible on others.
    """
    value, place = (values, "values") if one_for_each else (values[0], "value")
    if group.check is not None:
        group.check.compare(call, kinds_of(value, place))
    parts: list[Parts] = []
    kinds: list[tuple[str, str]] = []
    name: OpName = "sum"
    try:
        name = read_op(op)
        if dst is not None:
            group.index_of(dst, "dst")
        if one_for_each:
            values = check_one_for_each(group, values, "values")
        names = [f"values[{i}]" for i in range(len(values))] if one_for_each else ["value"]
        parts = [take_apart(value, place=name) for value, name in zip(values, names, strict=True)]
        leaves = [leaf for part in parts for leaf in part.leaves]
        _check_leaves(leaves, name)
        kinds = signature(leaves)
        digest = hashlib.blake2b(repr(kinds).encode(), digest_size=16).digest()
        numbers = [leaf.value for leaf in leaves if _is_number(leaf)]
        found = [leaf.value for leaf in leaves if isinstance(leaf.value, Tensor)]
        follows = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in found)
        accelerated = any(tensor.device.type != "cpu" for tensor in found)
        sent: Outgoing = serialize((digest, numbers, follows, torch.is_grad_enabled(), accelerated))
    except (TypeError, ValueError, RecursionError) as error:
        sent = FailedSend(error)
    heard = [one.open() for one in object_transport.all_gather(group, call, sent, of=describe(value))]
    if len({each[0] for each in heard}) > 1:
        everyone = [one.open() for one in object_transport.all_gather(group, call, serialize(kinds))]
        raise RankMismatchError(f"{call}: {compare(everyone, group.ranks)}: make the values match on all ranks")
    asking = [each[2] for each in heard]
    check_grad_modes(group, call, asking, [each[3] for each in heard])
    return _Agreed(group, name, parts, [each[1] for each in heard], any(asking), any(each[4] for each in heard))


def _check_leaves(leaves: Sequence[Leaf], op: OpName) -> None:
    for place, value in leaves:
        if isinstance(value, Tensor):
            if value.layout != torch.strided:
                raise TypeError(f"{place} is a {value.layout} tensor: reduce it alone, or make it dense")
            if value.is_meta:
                raise TypeError(f"{place} is on the meta device and has no numbers to add: make it on a real device")
            check_dtype(value.dtype, op, place)
        elif isinstance(value, float) and op in BITWISE:
            raise TypeError(f"{place} is {value!r}, and {op!r} is for whole numbers and bool")


def _written(op: Op) -> str:
    """Return an operation as words, also an unknown one."""
    try:
        return repr(read_op(op))
    except ValueError:
        return repr(op)


def _is_number(leaf: Leaf) -> bool:
    return not isinstance(leaf.value, Tensor) and leaf.value is not None
