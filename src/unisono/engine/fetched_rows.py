"""Rows of divided tables that have come from other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["FetchedRows"]


class FetchedRows:
    """Rows of other ranks, by their number.

    >>> fetched = FetchedRows(torch.empty(0, 2))
    >>> fetched.add(torch.tensor([3, 7]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    >>> fetched.places(torch.tensor([7, 5])).tolist(), fetched.values[1].tolist()
    ([1, -1], [3.0, 4.0])
    """

    def __init__(self, like: Tensor) -> None:
        self._count = 0
        self.values = like.new_empty((0, like.shape[1]))
        """The rows, and room for more behind them."""
        self._rows = self._places = torch.empty(0, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """The size of the rows."""
        return self._count * self.values.shape[1] * self.values.element_size()

    def places(self, rows: Tensor) -> Tensor:
        """Return where in `values` each row is, [n]; -1 for those that are not there."""
        if not self._count:
            return torch.full_like(rows, -1)
        found = torch.searchsorted(self._rows, rows).clamp_(max=self._count - 1)
        return torch.where(self._rows[found] == rows, self._places[found], -1)

    def add(self, rows: Tensor, values: Tensor) -> None:
        """Add different rows that are not there yet."""
        start, self._count = self._count, self._count + len(rows)
        if self._count > len(self.values):
            larger = self.values.new_empty((max(2 * start, self._count), values.shape[1]))
            larger[:start] = self.values[:start]
            self.values = larger
        self.values[start : self._count] = values
        every = torch.cat([self._rows, rows])
        self._rows, order = torch.sort(every)
        self._places = torch.cat([self._places, torch.arange(start, self._count)])[order]
