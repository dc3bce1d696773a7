"""Which server has which rows, or which columns. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.embedding.initial_rows import mixed

__all__ = ["owned", "owned_columns"]

_LINE, _WIDE = 16, 4
"""Floats of a cache line, and of the widest element that a row is written by."""


def owned(rows: Tensor, *, server: int, servers: int, placement: str, table: int, length: int) -> Tensor | None:
    """Return the numbers of the entries whose rows a server has, ascending; None: it has all of them.

    Args:
        rows: Ascending rows of a table.
        server: The server.
        servers: The number of servers.
        placement: "hash": by a hash of the row, so that all servers have equally many of any rows. "table": each table
            as a whole, in turn. "range": by ranges of equal length.
        table: The number of the table.
        length: The number of the table's rows.

    >>> rows = torch.tensor([0, 3, 4, 9])
    >>> owned(rows, server=1, servers=2, placement="range", table=0, length=10).tolist()
    [3]
    >>> [owned(rows, server=s, servers=2, placement="hash", table=0, length=10).tolist() for s in (0, 1)]
    [[0, 1, 2], [3]]
    """
    if servers == 1:
        return None
    if placement == "table":
        return None if table % servers == server else rows[:0]
    if placement == "range":
        bounds = torch.tensor([-(-length * n // servers) for n in (server, server + 1)])
        start, stop = torch.searchsorted(rows, bounds).tolist()
        return torch.arange(start, stop)
    # The upper bits: the lower ones would deal rows in a pattern with those of an index of ids.
    return ((mixed(rows) >> 33) % servers == server).nonzero().view(-1)


def owned_columns(dim: int, *, server: int, servers: int) -> slice:
    """Return the columns that a server has of a table's rows: a range for each, and none on some if there are too few.

    Args:
        dim: The number of columns.
        server: The server.
        servers: The number of servers.

    >>> [owned_columns(128, server=s, servers=2) for s in (0, 1)]
    [slice(0, 64, None), slice(64, 128, None)]
    >>> [owned_columns(3, server=s, servers=2) for s in (0, 1)]
    [slice(0, 1, None), slice(1, 3, None)]
    """
    # Two servers should not write to one cache line, unless shares would be uneven.
    unit = next((n for n in (_LINE, _WIDE) if dim >= 4 * n * servers or not dim % (n * servers)), 1)
    units = -(-dim // unit)
    start, stop = (min(units * n // servers * unit, dim) for n in (server, server + 1))
    return slice(start, stop)
