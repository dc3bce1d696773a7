"""Dividing tensors into buckets, each of which travels as one message."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple

__all__ = ["Item", "group_by_size"]


class Item(NamedTuple):
    """The properties of a tensor that decide its bucket. Only tensors of one device and type share a bucket."""

    nbytes: int
    device: Hashable = None
    dtype: Hashable = None


def group_by_size(
    items: Iterable[Item], *, limit_nbytes: int, first_nbytes: int | None = None, exceed: bool = False
) -> list[list[int]]:
    """Divide items into buckets by their size.

    Args:
        items: The tensors, in the order in which they fill buckets.
        limit_nbytes: The size limit of a bucket. A larger item has a bucket to itself without `exceed`.
        first_nbytes: The limit of each device's first bucket if smaller, so that a message is sent early. Used only
            with `exceed`.
        exceed: True to close a bucket once it has reached the limit, False to close it before it would exceed it.

    Returns:
        The indices of the items in each bucket; buckets are in the order of their last items.

    >>> group_by_size([Item(3), Item(2), Item(9), Item(4)], limit_nbytes=5)
    [[0, 1], [2], [3]]
    >>> group_by_size([Item(20), Item(300), Item(100), Item(100)], limit_nbytes=250, first_nbytes=10, exceed=True)
    [[0], [1], [2, 3]]
    """
    closed: list[list[int]] = []
    still_open: dict[tuple[Hashable, Hashable], tuple[list[int], int]] = {}
    begun: set[Hashable] = set()
    for number, (nbytes, device, dtype) in enumerate(items):
        bucket, filled = still_open.pop((device, dtype), ([], 0))
        if bucket and not exceed and filled + nbytes > limit_nbytes:
            closed.append(bucket)
            bucket, filled = [], 0
        bucket.append(number)
        filled += nbytes
        is_first = first_nbytes is not None and device not in begun
        if exceed and filled >= (min(first_nbytes or 0, limit_nbytes) if is_first else limit_nbytes):
            closed.append(bucket)
            begun.add(device)
        else:
            still_open[device, dtype] = bucket, filled
    return sorted([*closed, *(bucket for bucket, _ in still_open.values())], key=lambda bucket: bucket[-1])
