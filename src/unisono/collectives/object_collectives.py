"""Collectives that move values of any kind between ranks, without combining them.

Receivers need not know anything in advance: no shapes, no types, no lists to fill. Gradients are those that
`collectives.differentiable` describes; `collectives.reductions` combines values.
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
from unisono.collectives.differentiable import all_gather_flat, all_to_all_flat, attach
from unisono.collectives.group import Group, group_of
from unisono.collectives.object_gradients import (
    attach_each,
    check_parts_in_backward,
    divided,
    open_with_gradients,
    places_of,
    reduce_gradients,
    replaced,
    scatter_gradients,
)
from unisono.collectives.object_transport import FailedSend, serialize_or_fail
from unisono.collectives.serialization import FOLLOWED, Payload, serialize
from unisono.collectives.structure import check_concat, concatenate
from unisono.text import name_ranks

__all__ = ["all_gather", "all_to_all", "broadcast", "gather", "scatter"]


def broadcast(value: Any = None, src: int = 0, *, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Send the value of one rank to every rank. Every rank of the group must call it.

    Differentiable: src gets the sum of the gradients of all ranks, by one reduce for each tensor that requires one.

    Traffic: src broadcasts an envelope of 1 KiB, and the rest of its value if there is one. With `uniform`, src
    broadcasts the elements alone. Memory: the result, and buffers (see `unisono.comm`).

    Args:
        value: Any picklable object, with tensors anywhere in it. Without `uniform`, only that of src is used.
        src: The rank that has the value.
        uniform: True if all ranks pass a tensor of the same shape and type, so that only its elements need to travel.
            The tensors of other ranks are not written to.
        group: The ranks that take part; None is the whole job.

    Returns:
        The value. Its tensors are new, also on src, and on this rank's device of the type that they have on src; with
        `uniform`, on the device of this rank's argument.

    Raises:
        TypeError: The value of src cannot be pickled, or a value with `uniform` is not a tensor.
        ValueError: src is not in the group.
        PeerError: src has raised TypeError, or this rank cannot unpickle the value.
        GroupError, RankMismatchError: As all collectives; see `unisono.comm`.
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
        return attach([tensor], [result], lambda grads: reduce_gradients(members, root, grads) or [None])[0]
    _check(members, call, value)
    sent = serialize_or_fail(value) if members.rank == root else None
    arrived = object_transport.broadcast(members, call, sent, root, of=describe(value))
    received = arrived.unpack()
    if arrived.followed and torch.is_grad_enabled():
        places = [i for i, meta in enumerate(arrived.metas) if meta.follow == FOLLOWED]
        sources = [sent.tensors[i] for i in places] if isinstance(sent, Payload) else []
        attached = attach(sources, [received[i] for i in places], lambda grads: reduce_gradients(members, root, grads))
        received = replaced(received, places, attached)
    return arrived.open(received)


def all_gather(value: Any, *, concat: int | None = None, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Send the values of all ranks to every rank. Every rank of the group must call it.

    Differentiable: each rank gets the sum of the gradients that all ranks have for its tensors, by an `all_to_all`
    (with `uniform`, a reduce-scatter).

    Traffic: an all-gather of envelopes, 1 KiB from each rank to every other. If some value has a rest, an all-gather of
    padded rests, or a broadcast of each rest where padding is too expensive. With `uniform`, one all-gather of the
    elements. Memory: the values of all ranks, with `concat` also their concatenation, and buffers (see `unisono.comm`);
    with `uniform`, buffers only for gradients.

    Args:
        value: Any picklable object; shapes and types may differ between ranks.
        concat: A dimension along which tensors (also in dicts, lists, tuples and dataclasses of one structure) are
            concatenated, in the order of the group. They may differ in that dimension alone. None returns a list.
        uniform: True if all ranks pass a tensor of the same shape and type, so that only its elements need to travel.
        group: The ranks that take part; None is the whole job.

    Returns:
        A list of the values in the order of the group, or their concatenation. Tensors are new, also this rank's own.

    Raises:
        TypeError: The value cannot be pickled, is not a tensor with `uniform`, or has other leaves than tensors with
            `concat`.
        ValueError: A tensor does not have the dimension `concat`.
        PeerError: Without `uniform`, another rank has raised one of these, or this rank cannot unpickle its value.
        RankMismatchError: Tensors cannot be concatenated; some ranks require gradients and others are in no_grad mode;
            or ranks make different calls.
        GroupError: As all collectives; see `unisono.comm`.
    """
    members = group_of(group)
    if uniform:
        return _all_gather_uniform(members, only_tensor(value, "all_gather"), concat)
    call = "all_gather" if concat is None else f"all_gather with concat={concat}"
    _check(members, call, value)
    sent = serialize_or_fail(value, concat)
    arrived = object_transport.all_gather(members, call, sent, of=describe(value))
    values = open_with_gradients(members, call, arrived, [sent] * members.size)
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

    Traffic: an all-gather of envelopes, 1 KiB from each rank to every other, so that all learn of an error. Rests go to
    dst alone: in a gather of padded rests, or in a message from each rank that has one where padding is too expensive.
    With `uniform`, one gather of the elements. The backward is a `scatter` from dst. Memory: on dst as for
    `all_gather`, elsewhere buffers alone.

    Args:
        value: Any picklable object; shapes and types may differ between ranks.
        dst: The rank that receives the values.
        concat: As for `all_gather`.
        differentiable: True to propagate gradients from dst to the other ranks. Those then receive a zero instead of
            None, which they add to their loss, so that their backward waits for the gradient. False detaches results.
        uniform: True if all ranks pass a tensor of the same shape and type. Ignored if `differentiable` is true.
        group: The ranks that take part; None is the whole job.

    Returns:
        On dst, a list of the values in the order of the group, or their concatenation; None elsewhere.

    Raises:
        TypeError, ValueError, PeerError, GroupError: As `all_gather`; ValueError also if dst is not in the group.
        RankMismatchError: As `all_gather`, but on dst alone if tensors cannot be concatenated.
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
    root, sent = 0, serialize_or_fail(value, concat, follow=differentiable)
    try:
        root = members.index_of(dst, "dst")
    except (TypeError, ValueError) as error:
        sent = FailedSend(error)
    arrived = object_transport.gather(members, call, sent, root, of=describe(value))
    assert isinstance(sent, Payload)
    if arrived is None and not differentiable:
        return None
    own = places_of(sent)
    sources = [sent.tensors[i] for i in own]
    if arrived is None:
        (zero,) = attach(sources, [torch.zeros(())], lambda _: scatter_gradients(members, None, root))
        return zero
    received = [one.unpack() for one in arrived]
    if differentiable and torch.is_grad_enabled():
        places = [places_of(one) for one in arrived]

        def give_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            return scatter_gradients(members, divided(grads, places), root)

        received = attach_each(sources, received, places, give_back)
    values = [one.open(its) for one, its in zip(arrived, received, strict=True)]
    return values if concat is None else concatenate(values, concat, members.ranks, call)


def scatter(
    values: Sequence[Any] | Tensor | None = None, src: int = 0, *, uniform: bool = False, group: GroupArgument = None
) -> Any:
    """Send each rank its own value from one rank. Every rank of the group must call it.

    Differentiable: src gets the gradients of all ranks, by a `gather`.

    Traffic: src sends an envelope of 1 KiB to each rank, in one scatter. Rests follow in a scatter of padded rests, or
    in one message for each where padding is too expensive. With `uniform`, one scatter of the elements.
    Memory: this rank's value, and buffers (see `unisono.comm`), on src for all values if they are padded.

    Args:
        values: On src, one value for each rank, in the order of the group: any picklable objects. A tensor is cut along
            its first dimension, into parts that differ by at most one in length, the longer ones first (with `uniform`,
            into equal parts). The argument of other ranks is used only with `uniform`.
        src: The rank that has the values.
        uniform: True if all values are tensors of one shape and type. Other ranks then pass a tensor of that shape and
            type on their own device, which is not written to.
        group: The ranks that take part; None is the whole job.

    Returns:
        This rank's value; its tensors are new.

    Raises:
        TypeError: On src, a value cannot be pickled or `values` is not a list. With `uniform`, a value is not a tensor.
        ValueError: On src, the number of values is wrong, or some require a gradient and others have no floating-point
            tensor. On any rank, src is not in the group.
        PeerError: Without `uniform`, src has raised one of these, or this rank cannot unpickle its value.
        GroupError, RankMismatchError: As all collectives; see `unisono.comm`.
    """
    members = group_of(group)
    root = members.index_of(src, "src")
    call = f"scatter from rank {src}"
    if uniform:
        return _scatter_uniform(members, call, values, root)
    _check(members, call, values)
    sent = _serialized_each(members, values, "values", whole=True) if members.rank == root else None
    if isinstance(sent, list) and any(payload.followed for payload in sent):
        lacking = [rank for rank, payload in zip(members.ranks, sent, strict=True) if not places_of(payload)]
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
        own = places_of(arrived)
        kept = sent if isinstance(sent, list) else []
        sources = [payload.tensors[i] for payload in kept for i in places_of(payload)]

        def give_back(grads: Sequence[Tensor]) -> Sequence[Tensor]:
            back = object_transport.gather(members, "the backward of " + call, serialize(list(grads)), root)
            return [] if back is None else [grad for one in back for grad in one.open()]

        received = replaced(received, own, attach(sources, [received[i] for i in own], give_back))
    return arrived.open(received)


def all_to_all(values: Sequence[Any] | Tensor, *, uniform: bool = False, group: GroupArgument = None) -> Any:
    """Send rank r the r-th value of every rank. Every rank of the group must call it.

    Differentiable: each rank gets the gradients of the values that it has sent, by another `all_to_all`.

    Traffic: an all-to-all of envelopes, 1 KiB from each rank to every other. If some value has a rest, one of the
    rests, without padding. With `uniform`, one all-to-all of the elements. Memory: the values received, for a tensor
    also their concatenation, and buffers (see `unisono.comm`); with `uniform`, the result alone.

    Args:
        values: One value for each rank, in the order of the group: any picklable objects. A tensor is cut along its
            first dimension into equal parts.
        uniform: True if all ranks pass a tensor to cut, of the same shape and type.
        group: The ranks that take part; None is the whole job.

    Returns:
        A list of the values received, in the order of the group. For a tensor, the concatenation of the parts received.

    Raises:
        TypeError: A value cannot be pickled, `values` is not a list, or is not a tensor with `uniform`.
        ValueError: The number of values is wrong, or a tensor cannot be cut into equal parts.
        PeerError: Without `uniform`, another rank has raised one of these, or this rank cannot unpickle a value.
        RankMismatchError: Some ranks require gradients, and others are in no_grad mode, or a rank receives no
            floating-point tensor; or ranks make different calls.
        GroupError: As all collectives; see `unisono.comm`.
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
    check_parts_in_backward(members, call, arrived)
    came = open_with_gradients(members, call, arrived, sent)
    return torch.cat(came) if isinstance(values, Tensor) else came


def _check(group: Group, call: str, value: Any, *, uniform: bool = False) -> None:
    """In check mode, compare the call with those of the other ranks; if `uniform`, the value too."""
    if group.check is not None:
        if uniform:
            group.check.compare(f"{call} with uniform=True", kinds_of(value))
        else:
            group.check.compare(call, described=describe(value))


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


def _serialized_each(group: Group, values: Any, name: str, *, whole: bool) -> list[Payload] | FailedSend:
    try:
        return [serialize(value) for value in _one_for_each(group, values, name, whole=whole)]
    except (TypeError, ValueError) as error:
        return FailedSend(error)


def _one_for_each(group: Group, values: Any, name: str, *, whole: bool) -> Sequence[Any]:
    """Return one value for each rank. `whole` allows cutting a tensor into unequal parts."""
    if not isinstance(values, Tensor):
        return check_one_for_each(group, values, name)
    if not whole:
        check_parts(values, group.size)
    elif values.dim() == 0:
        raise ValueError(
            f"{name} is a tensor without dimensions, which cannot be cut: give a list with a value per rank"
        )
    return values.tensor_split(group.size)
