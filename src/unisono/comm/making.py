"""Making something on every rank of a group, each by itself: a rank that cannot tells the others why.

Else they would wait for it in the collectives that follow. Whether ranks have made the same is for callers to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from unisono.comm import post
from unisono.comm.link import Link
from unisono.comm.parcels import wrap
from unisono.comm.post import Failure, Sent

__all__ = ["make_on_all"]

T = TypeVar("T")


def make_on_all(
    link: Link,
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
        sent: Sent = wrap(given(made))
    except errors as error:
        sent = Failure(error)  # the other ranks are told, then it is raised here
    everyone = [arrived.open() for arrived in post.all_gather(link, call, sent)]
    return made, everyone
