"""Which rows of a divided table have changed since a checkpoint: found by a hash of each row, not by noting writes.

So whatever writes rows, none is missed. Start reading at `RowChanges.since`.
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
    """Finds the rows of this rank that have changed since a checkpoint. Memory: 12 bytes for each present row, twice.

    Two values of a row have the same hash by a chance of one in 2^64.

    Args:
        length: The number of rows that are hashed at once.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._base = ""
        self._kept: list[_Hashed] = []
        self._found: list[_Hashed] = []

    def look(self, rows: int, present: Callable[[int, int], Tensor], tensors: Sequence[Tensor]) -> None:
        """Hash the rows as they are now.

        Args:
            rows: The number of rows of the table.
            present: Returns which rows start <= row < stop this rank has, [n]: 0 for those that it has not.
            tensors: Tensors with a row for each row of the table.
        """
        self._found = []
        for start in range(0, rows, self._length):
            own = present(start, min(start + self._length, rows)).nonzero().view(-1)
            self._found.append(_Hashed(own.int(), _hashes(own + start, tensors)))

    def since(self, base: str) -> Tensor | None:
        """Return the rows that have changed from a checkpoint to the last look, ascending; None if that is not known.

        Args:
            base: Its name; see `keep`.
        """
        if base != self._base or len(self._kept) != len(self._found):
            return None
        changed = [torch.empty(0, dtype=torch.int64)]
        for number, (before, now) in enumerate(zip(self._kept, self._found, strict=True)):
            differing = _differing(before, now)
            if differing is None:
                return None
            changed.append(differing + number * self._length)
        return torch.cat(changed)

    def keep(self, base: str) -> None:
        """Keep the rows as they were at the last look, as those of a checkpoint.

        Args:
            base: A name for it.
        """
        self._base, self._kept = base, self._found

    def drop(self) -> None:
        """Give back the memory of the last look, unless it is kept."""
        self._found = []


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
