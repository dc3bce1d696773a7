"""Collectives that bring values of any kind from rank to rank, as they are.

Receivers need to know nothing before: no shapes, no types, no lists to fill. What `collectives.differentiable` says of
gradients holds here; combining values is `collectives.reductions`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unisono.collectives import object_transport
from unisono.collectives import tensor_collectives as tensors
from unisono.collectives.argument_checks import GroupArgument, check_one_for_each, check_parts, follows, only_tensor
from unisono.collectives.call_description import describe, kinds_of
from unisono.collectives.differentiable import SendBack, all_gather_flat, all_to_all_flat, attach
from unisono.collectives.group import Group, group_of
from unisono.collectives.object_transport import FailedSend, Received
from unisono.collectives.serialization import FOLLOWED, NOT_FOLLOWED, Payload, serialize
from unisono.collectives.structure import check_concat, concatenate
from unisono.errors import RankMismatchError
from unisono.text import name_ranks

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]


def broadcast(value: Any = None, src: int = 0, *, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Send the value of one rank to every rank. Every rank of the group must call it.

    Args:
        value: any picklable object, with tensors anywhere in it; what other ranks than src give is not looked at.
        src: rank that has the value.
        uniform: promises a tensor, of the same shape and type on all ranks, so that nothing but its elements needs to
            travel. Other ranks then give a tensor of that shape, type and device, which is not written to.
        group: ranks that take part; None is the whole job.

    Returns: the value, with tensors of its own, also on src. Tensors are on this rank's device of the type that they
    had there. Differentiable: src gets the sum of the gradients of all ranks.
    Raises: TypeError on src for a value that cannot be pickled, and PeerError on the others.
    """
    members = group_of(group)
    root = members.index_of(src, "src")
    call = f"broadcast from rank {src}"
    if uniform:
        tensor = only_tensor(value, call)
        _check(members, call, tensor, uniform=True)
        result = tensors.broadcast(members, tensor, root)
        if not follows(tensor):
            return result
        return attach([tensor], [result], lambda grads: _reduced_to(members, root, grads) or [None])[0]
    _check(members, call, value)
    sent = _serialized(value) if members.rank == root else None
    arrived = object_transport.broadcast(members, call, sent, root, of=describe(value))
    received = arrived.unpack()
    if arrived.followed and torch.is_grad_enabled():
        places = [i for i, meta in enumerate(arrived.metas) if meta.follow == FOLLOWED]
        sources = [sent.tensors[i] for i in places] if isinstance(sent, Payload) else []
        attached = attach(sources, [received[i] for i in places], lambda grads: _reduced_to(members, root, grads))
        received = _replaced(received, places, attached)
    return arrived.open(received)


def all_gather(value: Any, *, concat: int | None = None, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Send the values of all ranks to every rank. Every rank of the group must call it.

    Args:
        value: any picklable object; shapes and types may differ between ranks.
        concat: with a dimension, tensors (also in dicts, lists, tuples and dataclasses of one structure) are joined
            along it, in the order of ranks. They may differ in that dimension alone.
        uniform: promises a tensor, of the same shape and type on all ranks, so that nothing but its elements needs to
            travel.
        group: ranks that take part; None is the whole job.

    Returns: a list of the values in the order of the group, or the joined ones; tensors are new, also this rank's own.
    Differentiable: each rank gets the sum of the gradients that all ranks have for its tensors.
    Raises: TypeError for a value that cannot be pickled, and PeerError on the others; RankMismatchError if tensors
    cannot be joined.
    """
    members = group_of(group)
    if uniform:
        return _all_gather_uniform(members, only_tensor(value, "all_gather"), concat)
    call = "all_gather" if concat is None else f"all_gather with concat={concat}"
    _check(members, call, value)
    sent = _serialized(value, concat)
    arrived = object_transport.all_gather(members, call, sent, of=describe(value))
    values = _opened_together(members, call, arrived, [sent] * members.size)
    return values if concat is None else concatenate(values, concat, members.ranks, call)


def gather(
    value: Any,
    dst: int = 0,
    *,
    concat: int | None = None,
    differentiable: bool = False,
    uniform: bool = False,
    group: GroupArgument = None,
) -> Any:
    """Send the values of all ranks to one. Every rank of the group must call it.

    Args:
        value: any picklable object; shapes and types may differ between ranks.
        dst: rank that gets the values.
        concat: as for `all_gather`.
        differentiable: let gradients flow back from dst. The other ranks then get a zero instead of None, which they
            add to their loss, so that their backward waits for the gradient. Without it, results are detached.
        uniform: promises a tensor, of the same shape and type on all ranks.
        group: ranks that take part; None is the whole job.

    Returns: on dst a list of the values in the order of the group, or the joined ones; None elsewhere.
    Raises: as `all_gather`; but what cannot be joined is an error on dst alone.
    """
    members = group_of(group)
    call = f"gather to rank {dst}" if concat is None else f"gather to rank {dst} with concat={concat}"
    if uniform and not differentiable:
        root, tensor = members.index_of(dst, "dst"), only_tensor(value, call)
        check_concat(tensor, concat)
        _check(members, call, tensor, uniform=True)
        parts = tensors.gather(members, tensor, root)
        return parts if concat is None or parts is None else torch.cat(parts, concat)
    _check(members, call, value)
    root, sent = 0, _serialized(value, concat, follow=differentiable)
    try:
        root = members.index_of(dst, "dst")
    except (TypeError, ValueError) as error:
        sent = FailedSend(error)
    arrived = object_transport.gather(members, call, sent, root, of=describe(value))
    assert isinstance(sent, Payload)
    if arrived is None and not differentiable:
        return None
    own = _places(sent)
    sources = [sent.tensors[i] for i in own]
    if arrived is None:
        (zero,) = attach(sources, [torch.zeros(())], lambda _: _gradients_from(members, None, root))
        return zero
    received = [one.unpack() for one in arrived]
    if differentiable and torch.is_grad_enabled():
        places = [_places(one) for one in arrived]

        def give_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            return _gradients_from(members, _divided(grads, places), root)

        received = _attached(sources, received, places, give_back)
    values = [one.open(its) for one, its in zip(arrived, received, strict=True)]
    return values if concat is None else concatenate(values, concat, members.ranks, call)


def scatter(
    values: Sequence[Any] | Tensor | None = None, src: int = 0, *, uniform: bool = False, group: GroupArgument = None
) -> Any:
    """Send each rank its value of those that one rank has. Every rank of the group must call it.

    Args:
        values: on src one value for each rank, in the order of the group: any picklable objects. A tensor is cut along
            its first dimension, into parts that differ by at most one in length, the longer ones first. What other
            ranks give is not looked at.
        src: rank that has the values.
        uniform: promises that values are tensors of one shape and type. Other ranks then give a tensor of that shape,
            type and device, which is not written to.
        group: ranks that take part; None is the whole job.

    Returns: this rank's value; its tensors are new. Differentiable: src gets the gradients of all ranks.
    Raises: on src ValueError for a wrong number of values and TypeError for one that cannot be pickled; PeerError on
    the others.
    """
    members = group_of(group)
    root = members.index_of(src, "src")
    call = f"scatter from rank {src}"
    if uniform:
        return _scatter_uniform(members, call, values, root)
    _check(members, call, values)
    sent = _serialized_each(members, values, "values", whole=True) if members.rank == root else None
    if isinstance(sent, list) and any(payload.followed for payload in sent):
        lacking = [rank for rank, payload in zip(members.ranks, sent, strict=True) if not _places(payload)]
        if lacking:
            sent = FailedSend(
                ValueError(
                    f"values for {name_ranks(lacking)} have no floating-point tensor and others require a gradient, "
                    "so that a backward would wait for ever: detach() them"
                )
            )
    arrived = object_transport.scatter(members, call, sent, root, of=describe(values))
    received = arrived.unpack()
    if arrived.followed and torch.is_grad_enabled():
        own = _places(arrived)
        kept = sent if isinstance(sent, list) else []
        sources = [payload.tensors[i] for payload in kept for i in _places(payload)]

        def give_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            back = object_transport.gather(members, "the backward of " + call, serialize(list(grads)), root)
            return [] if back is None else [grad for one in back for grad in one.open()]

        received = _replaced(received, own, attach(sources, [received[i] for i in own], give_back))
    return arrived.open(received)


def all_to_all(values: Sequence[Any] | Tensor, *, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Send rank r the r-th value of every rank. Every rank of the group must call it.

    Args:
        values: one value for each rank, in the order of the group: any picklable objects. A tensor is cut along its
            first dimension into equal parts.
        uniform: promises a tensor that is cut, of the same shape and type on all ranks.
        group: ranks that take part; None is the whole job.

    Returns: a list of the values that came, in the order of the group; if a tensor was cut, a tensor of its shape, in
    which the parts that came stand one after the other. Differentiable: each rank gets the gradients of what it gave.
    Raises: ValueError for a wrong number of values, TypeError for one that cannot be pickled, and PeerError on the
    other ranks.
    """
    members = group_of(group)
    if uniform:
        tensor = only_tensor(values, "all_to_all")
        check_parts(tensor, members.size)
        lengths = [tensor.shape[0] // members.size] * members.size
        _check(members, "all_to_all", tensor, uniform=True)
        if follows(tensor):
            return all_to_all_flat(members, tensor, lengths, lengths)
        return tensors.all_to_all_flat(members, tensor, lengths, lengths)
    call = "all_to_all"
    _check(members, call, values)
    sent = _serialized_each(members, values, "values", whole=False)
    arrived = object_transport.all_to_all(members, call, sent, of=describe(values))
    assert isinstance(sent, list)
    came = _opened_together(members, call, arrived, sent)
    return torch.cat(came) if isinstance(values, Tensor) else came


def _check(group: Group, call: str, value: Any, *, uniform: bool = False) -> None:
    """In check mode, compare the call with those of the other ranks. Args: uniform: the value must agree too."""
    if group.check is not None:
        if uniform:
            group.check.compare(f"{call} with uniform=True", kinds_of(value))
        else:
            group.check.compare(call, described=describe(value))


def _opened_together(
    group: Group, call: str, arrived: Sequence[Received], sent: Sequence[Payload | FailedSend]
) -> list[Any]:
    """Make the values that came of all ranks, such that their gradients go back to them.

    Args: sent is what this rank sent to each. If it is one payload for all, the gradients of all are added.
    """
    received = [one.unpack() for one in arrived]
    if any(one.followed for one in arrived) and torch.is_grad_enabled():
        places = [_places(one) for one in arrived]
        payloads = [one for one in sent if isinstance(one, Payload)]
        same = all(one is payloads[0] for one in payloads)
        own = [_places(payload) for payload in payloads]
        if not any(places):
            raise RankMismatchError(
                f"{call}: values of other ranks require a gradient, and rank {group.own} got no floating-point tensor, "
                "so that it has no part in the backward: detach() them"
            )
        of_each = [[payload.tensors[i] for i in its] for payload, its in zip(payloads, own, strict=True)]
        sources = of_each[0] if same else [tensor for those in of_each for tensor in those]

        def send_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            leaving = [serialize(those) for those in _divided(grads, places)]
            coming = [one.open() for one in object_transport.all_to_all(group, "the backward of " + call, leaving)]
            if same:
                return [sum(those[1:], those[0]) for those in zip(*coming, strict=True)]
            return [grad for those in coming for grad in those]

        received = _attached(sources, received, places, send_back)
    return [one.open(its) for one, its in zip(arrived, received, strict=True)]


def _all_gather_uniform(group: Group, tensor: Tensor, concat: int | None) -> Any:
    check_concat(tensor, concat)
    _check(group, "all_gather" if concat is None else f"all_gather with concat={concat}", tensor, uniform=True)
    if follows(tensor):
        flat = all_gather_flat(group, tensor.reshape(1, -1))
        parts = [part.reshape(tensor.shape).clone() for part in flat.unbind()]
    elif concat == 0:
        return tensors.all_gather_flat(group, tensor)
    else:
        parts = tensors.all_gather(group, tensor)
    return parts if concat is None else torch.cat(parts, concat)


def _scatter_uniform(group: Group, call: str, values: Any, root: int) -> Tensor:
    if group.rank != root:
        like = only_tensor(values, call)
        given, sources = None, []
    else:
        given = [only_tensor(value, call) for value in _one_for_each(group, values, "values", whole=False)]
        like, sources = given[0], given
        other = next((t for t in given if (t.shape, t.dtype) != (like.shape, like.dtype)), None)
        if other is not None:
            raise ValueError(
                f"{call} with uniform=True: values are {like.dtype} {list(like.shape)} and {other.dtype} "
                f"{list(other.shape)}: leave uniform out"
            )
    _check(group, call, like, uniform=True)
    result = tensors.scatter(group, given, like, root)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (like, *sources)):
        return result
    return attach(sources, [result], lambda grads: tensors.gather(group, grads[0], root) or [])[0]


def _gradients_from(group: Group, grads: Sequence[Sequence[Tensor]] | None, root: int) -> Sequence[Tensor]:
    """Send each rank the gradients of what it has sent to one. Args: grads is None elsewhere."""
    sent = None if grads is None else [serialize(list(those)) for those in grads]
    back: Sequence[Tensor] = object_transport.scatter(group, "the backward of gather", sent, root).open()
    return back


def _reduced_to(group: Group, root: int, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add the gradients of all ranks on one; the others get nothing."""
    totals = [tensors.reduce(group, grad, "sum", root) for grad in grads]
    return [total for total in totals if total is not None]


def _places(one: Payload | Received) -> list[int]:
    """Return the numbers of the tensors that autograd could follow."""
    return [i for i, meta in enumerate(one.metas) if meta.follow != NOT_FOLLOWED]


def _attached(
    sources: Sequence[Tensor], received: Sequence[Sequence[Tensor]], places: Sequence[Sequence[int]], back: SendBack
) -> list[list[Tensor]]:
    """Attach those tensors of each list that autograd could follow. Args: places are their numbers in it."""
    flat = [tensors[i] for tensors, its in zip(received, places, strict=True) for i in its]
    new = _divided(attach(sources, flat, back), places)
    return [_replaced(tensors, its, those) for tensors, its, those in zip(received, places, new, strict=True)]


def _replaced(received: Sequence[Tensor], places: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    replaced = list(received)
    for place, tensor in zip(places, new, strict=True):
        replaced[place] = tensor
    return replaced


def _divided(flat: Sequence[Tensor], places: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Divide a list into lists as long as those."""
    parts = iter(flat)
    return [[next(parts) for _ in its] for its in places]


def _serialized(value: Any, concat: int | None = None, *, follow: bool = True) -> Payload | FailedSend:
    """Return the payload of a value, or the reason why there is none, for the other ranks."""
    try:
        if concat is not None:
            check_concat(value, concat)
        if follow:
            return serialize(value)
        with torch.no_grad():
            return serialize(value)
    except (TypeError, ValueError) as error:
        return FailedSend(error)


def _serialized_each(group: Group, values: Any, name: str, *, whole: bool) -> list[Payload] | FailedSend:
    try:
        return [serialize(value) for value in _one_for_each(group, values, name, whole=whole)]
    except (TypeError, ValueError) as error:
        return FailedSend(error)


def _one_for_each(group: Group, values: Any, name: str, *, whole: bool) -> Sequence[Any]:
    """Check that there is a value for each rank. Args: whole allows to cut a tensor into unequal parts."""
    if not isinstance(values, Tensor):
        return check_one_for_each(group, values, name)
    if not whole:
        check_parts(values, group.size)
    elif values.dim() == 0:
        raise ValueError(
            f"{name} is a tensor without dimensions, which cannot be cut: give a list with a value per rank"
        )
    return values.tensor_split(group.size)
