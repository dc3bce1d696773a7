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

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]


def broadcast(value: Any = None, src: int = 0, *, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Give every rank the value that one rank has. Every rank of the group must call it.

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
    link = group_of(group)
    root = link.index_of(src, "src")
    call = f"broadcast from rank {src}"
    if uniform:
        tensor = only_tensor(value, call)
        _check(link, call, tensor, uniform=True)
        result = tensors.broadcast(link, tensor, root)
        if not follows(tensor):
            return result
        return attach([tensor], [result], lambda grads: _reduced_to(link, root, grads) or [None])[0]
    _check(link, call, value)
    sent = _wrapped(value) if link.rank == root else None
    arrived = object_transport.broadcast(link, call, sent, root, of=describe(value))
    received = arrived.unpack()
    if arrived.followed and torch.is_grad_enabled():
        places = [i for i, facts in enumerate(arrived.facts) if facts.follow == FOLLOWED]
        sources = [sent.tensors[i] for i in places] if isinstance(sent, Payload) else []
        attached = attach(sources, [received[i] for i in places], lambda grads: _reduced_to(link, root, grads))
        received = _replaced(received, places, attached)
    return arrived.open(received)


def all_gather(value: Any, *, concat: int | None = None, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Give every rank the values of all. Every rank of the group must call it.

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
    link = group_of(group)
    if uniform:
        return _all_gather_uniform(link, only_tensor(value, "all_gather"), concat)
    call = "all_gather" if concat is None else f"all_gather with concat={concat}"
    _check(link, call, value)
    sent = _wrapped(value, concat)
    arrived = object_transport.all_gather(link, call, sent, of=describe(value))
    values = _opened_together(link, call, arrived, [sent] * link.size)
    return values if concat is None else concatenate(values, concat, link.ranks, call)


def gather(
    value: Any,
    dst: int = 0,
    *,
    concat: int | None = None,
    differentiable: bool = False,
    uniform: bool = False,
    group: GroupArgument = None,
) -> Any:
    """Give one rank the values of all. Every rank of the group must call it.

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
    link = group_of(group)
    call = f"gather to rank {dst}" if concat is None else f"gather to rank {dst} with concat={concat}"
    if uniform and not differentiable:
        root, tensor = link.index_of(dst, "dst"), only_tensor(value, call)
        check_concat(tensor, concat)
        _check(link, call, tensor, uniform=True)
        parts = tensors.gather(link, tensor, root)
        return parts if concat is None or parts is None else torch.cat(parts, concat)
    _check(link, call, value)
    root, sent = 0, _wrapped(value, concat, follow=differentiable)
    try:
        root = link.index_of(dst, "dst")
    except (TypeError, ValueError) as error:
        sent = FailedSend(error)
    arrived = object_transport.gather(link, call, sent, root, of=describe(value))
    assert isinstance(sent, Payload)
    if arrived is None and not differentiable:
        return None
    own = _places(sent)
    sources = [sent.tensors[i] for i in own]
    if arrived is None:
        (zero,) = attach(sources, [torch.zeros(())], lambda _: _given_back(link, None, root))
        return zero
    received = [one.unpack() for one in arrived]
    if differentiable and torch.is_grad_enabled():
        places = [_places(one) for one in arrived]

        def give_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            return _given_back(link, _dealt(grads, places), root)

        received = _attached(sources, received, places, give_back)
    values = [one.open(its) for one, its in zip(arrived, received, strict=True)]
    return values if concat is None else concatenate(values, concat, link.ranks, call)


def scatter(
    values: Sequence[Any] | Tensor | None = None, src: int = 0, *, uniform: bool = False, group: GroupArgument = None
) -> Any:
    """Give each rank its value of those that one rank has. Every rank of the group must call it.

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
    link = group_of(group)
    root = link.index_of(src, "src")
    call = f"scatter from rank {src}"
    if uniform:
        return _scatter_uniform(link, call, values, root)
    _check(link, call, values)
    sent = _wrapped_each(link, values, "values", whole=True) if link.rank == root else None
    if isinstance(sent, list) and any(parcel.followed for parcel in sent):
        lacking = [rank for rank, parcel in zip(link.ranks, sent, strict=True) if not _places(parcel)]
        if lacking:
            names = object_transport.name_some(lacking)
            sent = FailedSend(
                ValueError(
                    f"values for {names} have no floating-point tensor and others require a gradient, so that a "
                    "backward would wait for ever: detach() them"
                )
            )
    arrived = object_transport.scatter(link, call, sent, root, of=describe(values))
    received = arrived.unpack()
    if arrived.followed and torch.is_grad_enabled():
        own = _places(arrived)
        kept = sent if isinstance(sent, list) else []
        sources = [parcel.tensors[i] for parcel in kept for i in _places(parcel)]

        def give_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            back = object_transport.gather(link, "the backward of " + call, serialize(list(grads)), root)
            return [] if back is None else [grad for one in back for grad in one.open()]

        received = _replaced(received, own, attach(sources, [received[i] for i in own], give_back))
    return arrived.open(received)


def all_to_all(values: Sequence[Any] | Tensor, *, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Give rank r the r-th value of every rank. Every rank of the group must call it.

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
    link = group_of(group)
    if uniform:
        tensor = only_tensor(values, "all_to_all")
        check_parts(tensor, link.size)
        lengths = [tensor.shape[0] // link.size] * link.size
        _check(link, "all_to_all", tensor, uniform=True)
        if follows(tensor):
            return all_to_all_flat(link, tensor, lengths, lengths)
        return tensors.all_to_all_flat(link, tensor, lengths, lengths)
    call = "all_to_all"
    _check(link, call, values)
    sent = _wrapped_each(link, values, "values", whole=False)
    arrived = object_transport.all_to_all(link, call, sent, of=describe(values))
    assert isinstance(sent, list)
    came = _opened_together(link, call, arrived, sent)
    return torch.cat(came) if isinstance(values, Tensor) else came


def _check(link: Group, call: str, value: Any, *, uniform: bool = False) -> None:
    """In check mode, compare the call with those of the other ranks. Args: uniform: the value must agree too."""
    if link.check is not None:
        if uniform:
            link.check.compare(f"{call} with uniform=True", kinds_of(value))
        else:
            link.check.compare(call, described=describe(value))


def _opened_together(
    link: Group, call: str, arrived: Sequence[Received], sent: Sequence[Payload | FailedSend]
) -> list[Any]:
    """Make the values that came of all ranks, such that their gradients go back to them.

    Args: sent is what this rank sent to each. If it is one parcel for all, the gradients of all are added.
    """
    received = [one.unpack() for one in arrived]
    if any(one.followed for one in arrived) and torch.is_grad_enabled():
        places = [_places(one) for one in arrived]
        parcels = [one for one in sent if isinstance(one, Payload)]
        same = all(one is parcels[0] for one in parcels)
        own = [_places(parcel) for parcel in parcels]
        if not any(places):
            raise RankMismatchError(
                f"{call}: values of other ranks require a gradient, and rank {link.own} got no floating-point tensor, "
                "so that it has no part in the backward: detach() them"
            )
        of_each = [[parcel.tensors[i] for i in its] for parcel, its in zip(parcels, own, strict=True)]
        sources = of_each[0] if same else [tensor for those in of_each for tensor in those]

        def send_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            leaving = [serialize(those) for those in _dealt(grads, places)]
            coming = [one.open() for one in object_transport.all_to_all(link, "the backward of " + call, leaving)]
            if same:
                return [sum(those[1:], those[0]) for those in zip(*coming, strict=True)]
            return [grad for those in coming for grad in those]

        received = _attached(sources, received, places, send_back)
    return [one.open(its) for one, its in zip(arrived, received, strict=True)]


def _all_gather_uniform(link: Group, tensor: Tensor, concat: int | None) -> Any:
    check_concat(tensor, concat)
    _check(link, "all_gather" if concat is None else f"all_gather with concat={concat}", tensor, uniform=True)
    if follows(tensor):
        flat = all_gather_flat(link, tensor.reshape(1, -1))
        parts = [part.reshape(tensor.shape).clone() for part in flat.unbind()]
    elif concat == 0:
        return tensors.all_gather_flat(link, tensor)
    else:
        parts = tensors.all_gather(link, tensor)
    return parts if concat is None else torch.cat(parts, concat)


def _scatter_uniform(link: Group, call: str, values: Any, root: int) -> Tensor:
    if link.rank != root:
        like = only_tensor(values, call)
        given, sources = None, []
    else:
        given = [only_tensor(value, call) for value in _one_for_each(link, values, "values", whole=False)]
        like, sources = given[0], given
        other = next((t for t in given if (t.shape, t.dtype) != (like.shape, like.dtype)), None)
        if other is not None:
            raise ValueError(
                f"{call} with uniform=True: values are {like.dtype} {list(like.shape)} and {other.dtype} "
                f"{list(other.shape)}: leave uniform out"
            )
    _check(link, call, like, uniform=True)
    result = tensors.scatter(link, given, like, root)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (like, *sources)):
        return result
    return attach(sources, [result], lambda grads: tensors.gather(link, grads[0], root) or [])[0]


def _given_back(link: Group, grads: Sequence[Sequence[Tensor]] | None, root: int) -> Sequence[Tensor]:
    """Give each rank the gradients of what it has sent to one. Args: grads is None elsewhere."""
    sent = None if grads is None else [serialize(list(those)) for those in grads]
    back: Sequence[Tensor] = object_transport.scatter(link, "the backward of gather", sent, root).open()
    return back


def _reduced_to(link: Group, root: int, grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Add the gradients of all ranks on one; the others get nothing."""
    totals = [tensors.reduce(link, grad, "sum", root) for grad in grads]
    return [total for total in totals if total is not None]


def _places(one: Payload | Received) -> list[int]:
    """Give the numbers of the tensors that autograd could follow."""
    return [i for i, facts in enumerate(one.facts) if facts.follow != NOT_FOLLOWED]


def _attached(
    sources: Sequence[Tensor], received: Sequence[Sequence[Tensor]], places: Sequence[Sequence[int]], back: SendBack
) -> list[list[Tensor]]:
    """Attach those tensors of each list that autograd could follow. Args: places are their numbers in it."""
    flat = [tensors[i] for tensors, its in zip(received, places, strict=True) for i in its]
    new = _dealt(attach(sources, flat, back), places)
    return [_replaced(tensors, its, those) for tensors, its, those in zip(received, places, new, strict=True)]


def _replaced(received: Sequence[Tensor], places: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    replaced = list(received)
    for place, tensor in zip(places, new, strict=True):
        replaced[place] = tensor
    return replaced


def _dealt(flat: Sequence[Tensor], places: Sequence[Sequence[int]]) -> list[list[Tensor]]:
    """Divide a list into lists as long as those."""
    parts = iter(flat)
    return [[next(parts) for _ in its] for its in places]


def _wrapped(value: Any, concat: int | None = None, *, follow: bool = True) -> Payload | FailedSend:
    """Make a parcel, or the reason why there is none, for the others to know."""
    try:
        if concat is not None:
            check_concat(value, concat)
        if follow:
            return serialize(value)
        with torch.no_grad():
            return serialize(value)
    except (TypeError, ValueError) as error:
        return FailedSend(error)


def _wrapped_each(link: Group, values: Any, name: str, *, whole: bool) -> list[Payload] | FailedSend:
    try:
        return [serialize(value) for value in _one_for_each(link, values, name, whole=whole)]
    except (TypeError, ValueError) as error:
        return FailedSend(error)


def _one_for_each(link: Group, values: Any, name: str, *, whole: bool) -> Sequence[Any]:
    """Check that there is a value for each rank. Args: whole allows to cut a tensor into unequal parts."""
    if not isinstance(values, Tensor):
        return check_one_for_each(link, values, name)
    if not whole:
        check_parts(values, link.size)
    elif values.dim() == 0:
        raise ValueError(
            f"{name} is a tensor without dimensions, which cannot be cut: give a list with a value per rank"
        )
    return values.tensor_split(link.size)
