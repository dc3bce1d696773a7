"""Values from one rank to another, and the barrier.

As in `collectives.object_collectives`, a receiver needs to know nothing before. Autograd does not follow messages.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from unisono.collectives import object_transport
from unisono.collectives.argument_checks import GroupArgument
from unisono.collectives.group import Group, group_of
from unisono.collectives.object_transport import FailedSend, Outgoing
from unisono.collectives.serialization import serialize

__all__ = ["barrier", "recv", "send"]

_HIGHEST_TAG = 2**31 - 1


def send(value: Any, dst: int, *, tag: int = 0, group: GroupArgument = None) -> None:
    """Send a value to one rank, which calls `recv`. Returns when the value may be changed again.

    Args:
        value: any picklable object, with tensors anywhere in it.
        dst: rank that receives it.
        tag: tells messages between two ranks apart, where the backend does (not nccl).
        group: a group that both are in; None is the whole job.

    Raises: TypeError for a value that cannot be pickled, and PeerError on dst.
    """
    members = group_of(group)
    root = _other(members, dst, "dst")
    _check_tag(tag)
    try:
        with torch.no_grad():
            sent: Outgoing = serialize(value)
    except TypeError as error:
        sent = FailedSend(error)
    object_transport.send(members, f"send to rank {dst}", sent, root, tag)


def recv(src: int | None = None, *, tag: int = 0, group: GroupArgument = None) -> Any:
    """Receive the value that a rank sends to this one by `send`.

    Args:
        src: rank that sends it; None is any (not nccl). Let the value say who sent it, where that matters.
        tag, group: as in `send`.

    Returns: the value, with tensors of its own, on this rank's device of the type that they had there.
    Raises: PeerError if the value could not be sent.
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
    """Wait until every rank of the group has called it. Args: group None is the whole job."""
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
