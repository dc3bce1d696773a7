"""Messages from one rank to another, and the barrier.

As in `collectives.object_collectives`, a receiver need not know anything in advance. Messages carry no gradients.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from unisono.collectives import object_transport
from unisono.collectives.argument_checks import GroupArgument
from unisono.collectives.group import Group, group_of

__all__ = ["barrier", "recv", "send"]

_HIGHEST_TAG = 2**31 - 1


def send(value: Any, dst: int, *, tag: int = 0, group: GroupArgument = None) -> None:
    """Send a value to one rank, which must call `recv`; no other rank takes part. Returns when the value may change.

    Traffic: a message of 1 KiB to dst, the envelope, and a second one with the rest of a larger value. Memory: up to
    two copies of the tensors on the way.

    Args:
        value: Any picklable object, with tensors anywhere in it.
        dst: The rank that receives it.
        tag: Distinguishes messages between two ranks, if the backend supports it (not nccl).
        group: A group with both ranks; None is the whole job.

    Raises:
        TypeError: The value cannot be pickled. `recv` on dst then raises PeerError.
        ValueError: dst is this rank or not in the group, or the tag is not allowed.
        GroupError: As all collectives; see `unisono.comm`.
    """
    members = group_of(group)
    root = _other(members, dst, "dst")
    _check_tag(tag)
    sent = object_transport.serialize_or_fail(value, follow=False)
    object_transport.send(members, f"send to rank {dst}", sent, root, tag)


def recv(src: int | None = None, *, tag: int = 0, group: GroupArgument = None) -> Any:
    """Return the value that a rank sends to this one by `send`. No other rank takes part.

    Traffic: the messages of `send`, received. Memory: the value, and a buffer of the size of its tensors on the way.

    Args:
        src: The rank that sends it; None is any rank (not over nccl). The value must name its sender if that matters.
        tag: As for `send`.
        group: As for `send`.

    Returns:
        The value. Its tensors are new, on this rank's device of the type that they have on the sender.

    Raises:
        PeerError: The value could not be sent, or this rank cannot unpickle it.
        ValueError: src is this rank or not in the group, the tag is not allowed, or the backend needs src.
        RankMismatchError: The message was not sent by `send`.
        GroupError: As all collectives; see `unisono.comm`.
    """
    members = group_of(group)
    root = None if src is None else _other(members, src, "src")
    _check_tag(tag)
    if root is None and "cpu" not in members.backends:
        raise ValueError(
            f"{members.accelerator and members.backends[members.accelerator]} cannot receive from any rank: give src"
        )
    return object_transport.recv(members, root, tag).open()


def barrier(*, group: GroupArgument = None) -> None:
    """Wait until every rank of the group has called it. Every rank of the group must call it.

    Traffic: the backend's barrier, which carries no values. Memory: none.

    Args:
        group: The ranks that take part; None is the whole job.

    Raises:
        GroupError, RankMismatchError: As all collectives; see `unisono.comm`.
    """
    members = group_of(group)
    if members.process_group is None:
        return
    if members.check is not None:
        members.check.compare("barrier")
    device = members.bytes_device()
    if device.type == "cpu":
        members.run(("barrier", None), "", dist.barrier)
    else:
        dist.barrier(group=members.process_group, device_ids=[device.index])


def _other(group: Group, rank: int, argument: str) -> int:
    found = group.index_of(rank, argument)
    if found == group.rank:
        raise ValueError(f"{argument}={rank} is this rank itself, and there is nothing to send: use the value as it is")
    return found


def _check_tag(tag: int) -> None:
    if type(tag) is not int or not 0 <= tag <= _HIGHEST_TAG:
        raise ValueError(f"tag={tag!r} must be a whole number from 0 to {_HIGHEST_TAG}")
    if tag == object_transport.TAG:
        raise ValueError(f"tag={tag} is used within collectives: take another one")
