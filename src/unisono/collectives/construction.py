"""Making something on every rank of a group, each by itself: a rank that cannot tells the others why.

Else they would wait for it in the collectives that follow. Whether ranks have made the same is for callers to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from unisono.collectives import object_transport
from unisono.collectives.group import Group
from unisono.collectives.object_transport import FailedSend, Outgoing
from unisono.collectives.serialization import serialize

__all__ = ["construct_on_all"]

T = TypeVar("T")


def construct_on_all(
    link: Group,
    call: str,
    make: Callable[[], T],
    given: Callable[[T], Any],
    *,
    errors: tuple[type[Exception], ...] = (TypeError, ValueError),
) -> tuple[T, list[Any]]:
    """Make something, and learn what all ranks were given for it. Every rank of the group must call it.

    Args: call names it for people; given says of what was made what others are to know, picklable and small.
    Returns: what was made here, and what `given` says on each rank, in the order of the group.
    Raises: one of `errors` that `make` raises, and PeerError on the other ranks.
    """
    try:
        made = make()
        sent: Outgoing = serialize(given(made))
    except errors as error:
        sent = FailedSend(error)  # the other ranks are told, then it is raised here
    everyone = [arrived.open() for arrived in object_transport.all_gather(link, call, sent)]
    return made, everyone
