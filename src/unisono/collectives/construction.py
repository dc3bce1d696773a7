"""Making something on every rank of a group, each by itself: a rank that cannot is an error on all.

Otherwise they would wait for it in the collectives that follow. Callers compare whether ranks have made the same.
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
    group: Group,
    call: str,
    make: Callable[[], T],
    given: Callable[[T], Any],
    *,
    errors: tuple[type[Exception], ...] = (TypeError, ValueError),
) -> tuple[T, list[Any]]:
    """Make something, and learn what all ranks were given for it. Every rank of the group must call it.

    Args: call names it for people; given returns what the other ranks are to know of it, picklable and small.
    Returns: what was made here, and what `given` returned on each rank, in the order of the group.
    Raises: one of `errors` that `make` raises, and PeerError on the other ranks.
    """
    try:
        made = make()
        sent: Outgoing = serialize(given(made))
    except errors as error:
        sent = FailedSend(error)  # raised on the other ranks, then here
    everyone = [arrived.open() for arrived in object_transport.all_gather(group, call, sent)]
    return made, everyone
