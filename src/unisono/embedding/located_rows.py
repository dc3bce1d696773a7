"""What tables have in common of which some rows have no values yet: such rows read as their first values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unisono.embedding.initial_rows import initial_rows
from unisono.embedding.row_owners import RowOwners

__all__ = ["LocatedRows", "PlacedIds", "ReadRows"]

ReadRows = Callable[[int, int], tuple[Tensor, Tensor]]
"""Returns rows as they are in memory, and 1 for each that has values: of ids in ascending order, some that follow each
other."""


class PlacedIds(NamedTuple):
    """The rows of some ids in an update."""

    rows: Tensor
    """[n], int64; -1 for ids that have not been admitted."""
    new: Tensor
    """The numbers of the ids whose rows get their first values in this update."""


class LocatedRows(nn.Module):
    """The rows of a table, of which some have no values yet. They get them in the first update with their id.

    Args:
        name: The table, for messages.
        std: The standard deviation of first values.
    """

    def __init__(self, name: str, *, std: float) -> None:
        super().__init__()
        self.name, self.std = name, std
        self.wanted_length = 0
        """The number of rows that an update would need which was refused; 0: none was, or the table does not grow."""
        self.owners: RowOwners | None = None
        """Which rank has which rows, if they are divided over ranks; None: this rank has all of them."""
        self.look_up: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
        """Returns the same as `locate`, if rows are divided over ranks."""
        self.collect: Callable[[Callable[[ReadRows], None]], None] | None = None
        """Calls a function on rank 0 that may read the rows of all ranks, if they are divided; every rank calls it."""

    @property
    @abstractmethod
    def seed(self) -> int:
        """The number that determines first values."""

    @property
    @abstractmethod
    def count(self) -> int:
        """The number of rows that have values."""

    @property
    @abstractmethod
    def evicted(self) -> int:
        """The number of rows that have been given up so far."""

    @abstractmethod
    def find(self, ids: Tensor) -> Tensor:
        """Return the row of each id, [n], int64; -1 for those that have none.

        Args:
            ids: [n], int64.
        """

    @abstractmethod
    def numbers(self, ids: Tensor) -> Tensor:
        """Return the row that each id is to be read from, [n], int64; -1 for those that read as their first values.

        In a table of which each id has a row from the start, that is the id, if it has been written or not.

        Args:
            ids: [n], int64.
        """

    @abstractmethod
    def present(self, start: int, stop: int) -> Tensor:
        """Return 1 for each of the rows start <= row < stop that this rank has with values, and 0 for others, uint8."""

    @abstractmethod
    def place(self, ids: Tensor, everyone: Sequence[Tensor] | None = None) -> PlacedIds:
        """Note an update, and return the rows of some of its ids.

        Args:
            ids: [n], int64, all different.
            everyone: All ids of the update, at least one, which may be repeated; None: `ids` are all.

        Raises:
            TableFullError: There are not enough rows. Nothing has been changed.
        """

    @abstractmethod
    def undo(self) -> None:
        """Take back what the last update has noted, once."""

    def check_room(self, ids: Sequence[Tensor]) -> None:
        """Raise TableFullError if an update with these ids, which may be repeated, would find too few rows."""

    def locate(self, weight: Tensor, ids: Tensor, *, padding: int | None = None) -> tuple[Tensor, Tensor]:
        """Return a tensor with the values of ids, and the row of each id in it.

        It is the table, where all ids have a row. Otherwise it is a copy of the rows, [n, dim], with the first values
        of those that have none.

        Args:
            weight: The table, [capacity, dim].
            ids: [n], int64.
            padding: An id whose values are zeros; None: there is none.
        """
        if self.look_up is not None:
            return self.look_up(ids)
        return self.locate_own(weight, ids, padding=padding)

    def locate_own(self, weight: Tensor, ids: Tensor, *, padding: int | None = None) -> tuple[Tensor, Tensor]:
        """Return what `locate` does, of rows that this rank has."""
        rows = self.find(ids)
        missing = (rows < 0).nonzero().view(-1)
        if not len(missing):
            return weight, rows
        values = weight.index_select(0, rows.clamp_min_(0))
        first = self.first_values(ids.index_select(0, missing), weight, padding=padding)
        return values.index_copy_(0, missing, first), torch.arange(len(ids), device=ids.device)

    def first_values(self, ids: Tensor, weight: Tensor, *, padding: int | None = None) -> Tensor:
        """Return what ids without values of their own read as, [n, dim]; see `locate`."""
        first = self.initial(ids, weight)
        if padding is not None:
            first[ids == padding] = 0.0
        return first

    def initial(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Return the first values of the rows of ids, [n, dim], of the type of the table."""
        return initial_rows(ids, weight.shape[1], seed=self.seed, std=self.std, dtype=weight.dtype)

    @torch.no_grad()
    def write_first(self, ids: Tensor, rows: Tensor, weight: Tensor, state: Mapping[str, Any]) -> None:
        """Write the first values of new rows, and the state of an optimizer that has not seen them.

        Args:
            ids: [n].
            rows: Their rows.
            weight: The table, [capacity, dim].
            state: The state of its optimizer.
        """
        weight.index_copy_(0, rows, self.initial(ids, weight))
