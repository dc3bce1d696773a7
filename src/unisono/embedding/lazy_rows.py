"""Rows of a fixed table that are written for the first time when an update brings a gradient for them.

Before that, a row reads as its first values, which follow from the seed and its number. So a table of any size is there
at once, and rows that nobody looks up take no memory. As in a dynamic table, each rank sees the ids of all ranks in an
update, so all agree on what is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unisono.embedding.located_rows import LocatedRows, PlacedIds
from unisono.embedding.undo_log import UndoLog

__all__ = ["LazyRows"]


class LazyRows(LocatedRows):
    """Which rows of a fixed table have been written.

    Args:
        name: The table, for messages.
        rows: The number of rows.
        seed: Determines the first values.
        std: The standard deviation of these values.
    """

    NBYTES_PER_ROW = 1

    def __init__(self, name: str, rows: int, *, seed: int, std: float) -> None:
        super().__init__(name, std=std)
        self.written = nn.Parameter(torch.zeros(rows, dtype=torch.uint8), requires_grad=False)
        """1 for each row that has been written."""
        self.first_seed = nn.Parameter(torch.tensor([seed]), requires_grad=False)
        self._log = UndoLog()

    def extra_repr(self) -> str:
        """Return what print shows of it."""
        return f"{self.count} of {len(self.written)} rows written"

    @property
    def seed(self) -> int:
        """See `LocatedRows`."""
        return int(self.first_seed)

    @property
    def count(self) -> int:
        """See `LocatedRows`."""
        return int(self.written.count_nonzero())

    @property
    def evicted(self) -> int:
        """0: a row stays."""
        return 0

    def find(self, ids: Tensor) -> Tensor:
        """See `LocatedRows`."""
        return torch.where(self.written.detach().index_select(0, ids) != 0, ids, -1)

    def numbers(self, ids: Tensor) -> Tensor:
        """See `LocatedRows`."""
        return ids

    def present(self, start: int, stop: int) -> Tensor:
        """See `LocatedRows`."""
        return self.written.detach()[start:stop]

    def place(self, ids: Tensor, everyone: Sequence[Tensor] | None = None) -> PlacedIds:
        """See `LocatedRows`."""
        written = self.written.detach()
        new = (written.index_select(0, ids) == 0).nonzero().view(-1)
        self._log.clear()
        for each in [ids] if everyone is None else everyone:
            missing = new if each is ids else (written.index_select(0, each) == 0).nonzero().view(-1)
            if len(missing):
                self._log.write(self.written, each.index_select(0, missing), written.new_ones(1))
        return PlacedIds(ids, new)

    def undo(self) -> None:
        """See `LocatedRows`."""
        self._log.undo()
