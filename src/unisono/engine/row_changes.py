"""Which rows of a divided table have changed since rank 0 got them: found by a hash of each row, not by noting writes.

So whatever writes rows, none is missed. Start reading at `RowChanges.find`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from unisono.embedding.initial_rows import mixed

__all__ = ["RowChanges"]

_WORD_NBYTES = 8


class _Hashed(NamedTuple):
    """The rows of this rank in a part of a table."""

    rows: Tensor
    """Counted from the first row of the part, ascending, int32."""
    hashes: Tensor
    """[n], int64."""


class RowChanges:
    """Finds the rows of this rank that have changed. Memory: 12 bytes for each row that is present.

    Two values of a row have the same hash by a chance of one in 2^64.

    Args:
        length: The number of rows that are hashed at once.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._kept: list[_Hashed] | None = None
        self._found: list[_Hashed] = []

    def forget(self) -> None:
        """Let the next `find` know nothing."""
        self._kept = None

    def find(self, rows: int, present: Callable[[int, int], Tensor], tensors: Sequence[Tensor]) -> Tensor | None:
        """Return the rows that have changed since `keep`, ascending; None if that is not known.

        Args:
            rows: The number of rows of the table.
            present: Returns which rows start <= row < stop this rank has, [n]: 0 for those that it has not.
            tensors: Tensors with a row for each row of the table.
        """
        self._found = []
        changed: list[Tensor] = []
        is_known = self._kept is not None and len(self._kept) == -(-rows // self._length)
        for number, start in enumerate(range(0, rows, self._length)):
            own = present(start, min(start + self._length, rows)).nonzero().view(-1)
            now = _Hashed(own.int(), _hashes(own + start, tensors))
            self._found.append(now)
            if is_known:
                assert self._kept is not None
                differing = _differing(self._kept[number], now)
                is_known = differing is not None
                if differing is not None and len(differing):
                    changed.append(differing + start)
        if not is_known:
            return None
        return torch.cat(changed) if changed else torch.empty(0, dtype=torch.int64)

    def keep(self) -> None:
        """Note that rank 0 has the rows as they were at the last `find`."""
        self._kept = self._found


def _differing(before: _Hashed, now: _Hashed) -> Tensor | None:
    """Return the rows that are new or have another hash; None if a row is gone."""
    places = torch.searchsorted(now.rows, before.rows)
    if len(before.rows) and (
        int(places[-1]) >= len(now.rows) or not torch.equal(now.rows.index_select(0, places), before.rows)
    ):
        return None
    differs = torch.ones(len(now.rows), dtype=torch.bool)
    differs[places] = now.hashes.index_select(0, places) != before.hashes
    return now.rows[differs].long()


def _hashes(rows: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Return a hash of each of some rows over all tensors, [n], int64."""
    total, first = torch.zeros(len(rows), dtype=torch.int64), 0
    for tensor in tensors:
        nbytes = tensor.shape[1:].numel() * tensor.element_size()
        data = tensor.detach().index_select(0, rows).view(-1).view(torch.uint8).view(-1, nbytes)
        words = F.pad(data, (0, -nbytes % _WORD_NBYTES)).view(torch.int64)
        # Each word is mixed with its place first, so that equal changes of two words do not cancel each other.
        places = mixed(torch.arange(first + 1, first + 1 + words.shape[1]))
        total += mixed(words ^ places).sum(1)
        first += words.shape[1]
    return total
