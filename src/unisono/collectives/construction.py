"""Construction of an object on every rank of a group, with an error on all ranks if one fails.

Otherwise the others would wait for it in later collectives. Callers check that the objects of the ranks agree.
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
    """Make an object, and exchange descriptions of it. Every rank of the group must call it.

    Args:
        group: The group.
        call: The name of the call, for messages.
        make: Makes the object.
        given: Returns the description of an object for the other ranks, picklable and small.
        errors: The errors of `make` and `given` that the other ranks learn of.

    Returns:
        The object of this rank, and the descriptions of all ranks in the order of the group.

    Raises:
        PeerError: Another rank has raised one of `errors`; that rank raises the error itself.
    """
    try:
        made = make()
        sent: Outgoing = serialize(given(made))
    except errors as error:
        sent = FailedSend(error)  # raised on the other ranks, then here
    everyone = [arrived.open() for arrived in object_transport.all_gather(group, call, sent)]
    return made, everyone
