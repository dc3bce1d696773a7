"""Which rank has which rows of a table that is divided over ranks, and which rows of a step it updates. Pure.

Rows are dealt in blocks, by a hash of the number of the block: often the first ids are the frequent ones, and they
spread over ranks. A block of a large table is a page of memory, so no page is needed on two ranks without need. Where
each row is kept twice, so that it survives its rank, the second one is that of another host, if there are several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.embedding.initial_rows import mixed
from unisono.embedding.zero_memory import LEAST_NBYTES, PAGE_NBYTES

__all__ = ["RowOwners", "range_by_sample"]

_FILE_BLOCK_NBYTES = 1 << 18
_FILE_BITS = 10
"""Rows of a block in a file: numbers that there are one of for each row then fill a page of it, too."""
_FILE_BLOCKS = 64
"""The number of blocks for each rank, at least."""
_MOST_NOTED = 1 << 20
"""Of so many blocks the owners are noted, as they are looked up faster than computed. It takes 2 bytes for each."""
_LEAST_ENTRIES = 256
"""With fewer entries for each of several owners of rows, the work is less than that of dividing it."""
_SAMPLED = 32
"""The number of entries in a sample for each owner: shares differ by a few percent."""


class RowOwners:
    """The owners of the rows of one table: the ranks that tell others what is in a row.

    Args:
        rows: The number of rows.
        row_nbytes: The size of a row.
        rank: This rank.
        ranks: The number of ranks.
        shift: How much greater the number of the rank that keeps a row, too, is than that of its owner; 0: there is
            none. Not a multiple of `ranks` otherwise.
        in_file: True for rows in a file, whose space is reserved in one piece for each block: these are larger then.

    >>> owners = RowOwners(100_000, 64, rank=0, ranks=3)
    >>> owners.block_length, torch.bincount(owners.of(torch.arange(100_000))).tolist()
    (64, [31168, 33568, 35264])
    """

    def __init__(
        self, rows: int, row_nbytes: int, *, rank: int, ranks: int, shift: int = 0, in_file: bool = False
    ) -> None:
        self._rank, self._ranks, self.shift, self._rows = rank, ranks, shift, rows
        # Of a small table pages would be few, and it has no pages of its own.
        is_small = rows * row_nbytes < LEAST_NBYTES
        self._bits = 0 if is_small else (PAGE_NBYTES // math.gcd(PAGE_NBYTES, row_nbytes)).bit_length() - 1
        if in_file and not is_small:
            wanted = max((_FILE_BLOCK_NBYTES // row_nbytes).bit_length() - 1, _FILE_BITS)
            most = (rows // (_FILE_BLOCKS * ranks)).bit_length() - 1  # so that shares are about equal
            self._bits = max(min(wanted, most), self._bits)
        blocks = (rows - 1 >> self._bits) + 1
        self._of_blocks: Tensor | None = None
        """The owner of each block, int16; None if there are too many of them."""
        if blocks <= _MOST_NOTED and ranks < 1 << 15:
            self._of_blocks = self._rank_of(torch.arange(blocks)).to(torch.int16)

    @property
    def block_length(self) -> int:
        """The number of rows that follow each other on a rank."""
        return 1 << self._bits

    def of(self, ids: Tensor) -> Tensor:
        """Return the owner of each row, [n], int64; that of any for -1, which stands for no row."""
        blocks = ids >> self._bits
        if self._of_blocks is None:
            return self._rank_of(blocks)
        return self._of_blocks.index_select(0, blocks.clamp_min_(0)).long()

    def of_new(self, ids: Tensor) -> Tensor:
        """Return the rank that counts for each id of a dynamic table that has no row yet, [n], int64."""
        return self._rank_of(ids)

    def own(self, ids: Tensor) -> Tensor:
        """Return True for each row that this rank owns, [n]."""
        return self.of(ids) == self._rank

    def keep(self, ids: Tensor) -> Tensor:
        """Return True for each row that this rank keeps, [n]."""
        return self.kept_by(self._rank, self.of(ids))

    def kept_by(self, rank: int, owners: Tensor) -> Tensor:
        """Return True for each row that a rank keeps, [n].

        Args:
            rank: The rank.
            owners: The owner of each row.
        """
        is_own = owners == rank
        return is_own | (owners == (rank - self.shift) % self._ranks) if self.shift else is_own

    def other_keeper(self, owners: Tensor) -> Tensor:
        """Return the rank that keeps each row beside this one, [n]; only of rows that this rank keeps.

        Args:
            owners: The owner of each row.
        """
        return torch.where(owners == self._rank, (self._rank + self.shift) % self._ranks, owners)

    def kept_ranges(self) -> list[range]:
        """Return the rows that this rank keeps, in blocks; of a table without blocks, all rows."""
        if not self._bits:
            return [range(self._rows)]
        is_kept = self.keep(torch.arange(0, self._rows, self.block_length)).int()
        edges = torch.diff(is_kept, prepend=is_kept.new_zeros(1), append=is_kept.new_zeros(1))
        starts, stops = ((edges == edge).nonzero().view(-1) * self.block_length for edge in (1, -1))
        return [
            range(start, min(stop, self._rows)) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]

    def _rank_of(self, numbers: Tensor) -> Tensor:
        ranks: Tensor = mixed(numbers).bitwise_right_shift_(33).bitwise_and_(2**31 - 1)
        return ranks.remainder_(self._ranks)


def range_by_sample(owner: int, owners: int, lists: Sequence[Tensor]) -> tuple[int | None, int | None] | None:
    """Return the rows that one of several owners updates: start <= row < stop, where None is no bound.

    Few rows have a single owner. Otherwise boundaries are quantiles of a sample of the lists, each in proportion.

    Args:
        owner: The number of the owner.
        owners: The number of owners.
        lists: Ascending rows, of which a row may be in several lists.

    Returns:
        The bounds; None if the owner has no row.
    """
    total = sum([rows.shape[0] for rows in lists])
    owners = min(owners, max(total // _LEAST_ENTRIES, 1))
    if owner >= owners:
        return None
    sample: list[int] = []
    if owners > 1:
        stride = max(total // (_SAMPLED * owners), 1)
        for rows in lists:
            sample += rows[::stride].tolist()
        sample.sort()
    start = sample[len(sample) * owner // owners] if owner else None
    stop = sample[len(sample) * (owner + 1) // owners] if owner + 1 < owners else None
    return start, stop
