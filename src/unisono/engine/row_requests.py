"""What ranks ask each other for of tables whose rows are divided over them, as messages. Pure, but for reading rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_owners import RowOwners
from unisono.embedding.table_file import TableFile

__all__ = ["NOBODY", "DividedTable", "RowRequest", "by_table", "dealt", "packed", "unpacked"]

NOBODY = -1
"""Stands for the rank that has the row of an id without one."""


class DividedTable(NamedTuple):
    """A table whose rows are divided over ranks."""

    name: str
    weight: Tensor
    """[rows, dim], with the rows that this rank has, and zeros."""
    rows: LocatedRows
    owners: RowOwners
    padding: int | None
    """An id whose row reads as zeros as long as it has not been written; None: there is none."""
    file: TableFile | None
    """What has the rows and their state; None: they are in memory."""

    @property
    def row_nbytes(self) -> int:
        """The size of a row."""
        return self.weight.shape[1] * self.weight.element_size()

    def read(self, rows: Tensor) -> Tensor:
        """Return the values of rows that this rank has, [n, dim]."""
        weight = self.weight.detach()
        if isinstance(self.rows, RowMap):
            return weight.index_select(0, rows)
        source, places = self.rows.locate_own(weight, rows, padding=self.padding)
        return source.index_select(0, places)

    def owners_of(self, rows: Tensor) -> Tensor:
        """Return the owner of each row, [n]; `NOBODY` for -1, which stands for an id without a row."""
        return torch.where(rows < 0, NOBODY, self.owners.of(rows))


class RowRequest(NamedTuple):
    """Different rows of a table that other ranks have."""

    number: int
    """The number of the table."""
    rows: Tensor
    """[n], int64."""
    owners: Tensor
    """The rank that has each row, [n]."""


def dealt(rows: Tensor, owners: Tensor, ranks: int) -> tuple[list[Tensor], Tensor]:
    """Return the rows of each rank, and the order in which these lists, one behind the other, have all rows.

    >>> dealt(torch.tensor([3, 5, 8]), torch.tensor([1, 0, 1]), 2)
    ([tensor([5]), tensor([3, 8])], tensor([1, 0, 2]))
    """
    order = torch.argsort(owners, stable=True)
    counts = torch.bincount(owners, minlength=ranks).tolist()
    return list(torch.split(rows.index_select(0, order), counts)), order


def packed(vectors: Sequence[Tensor]) -> Tensor:
    """Return vectors of int64 as one, behind their lengths.

    >>> packed([torch.tensor([7, 8]), torch.tensor([9])])
    tensor([2, 1, 7, 8, 9])
    """
    return torch.cat([torch.tensor([*map(len, vectors)], dtype=torch.int64), *vectors])


def unpacked(vector: Tensor, count: int) -> list[Tensor]:
    """Return the vectors that `packed` got.

    Args:
        vector: What it has returned.
        count: How many there are.
    """
    lengths: list[int] = vector[:count].tolist()
    return list(torch.split(vector[count:], lengths))


def by_table(tables: Sequence[DividedTable], lookups: Iterable[tuple[nn.Module, Tensor]]) -> dict[int, Tensor]:
    """Return the ids of lookups by the number of the table, of those tables that are divided.

    Args:
        tables: The tables that are divided.
        lookups: Modules of tables, each perhaps several times, and ids, [n], int64.
    """
    numbers = {id(table.weight): number for number, table in enumerate(tables)}
    found: dict[int, list[Tensor]] = {}
    for module, ids in lookups:
        if (number := numbers.get(id(module.weight))) is not None:
            found.setdefault(number, []).append(ids)
    return {number: torch.cat(parts) for number, parts in found.items()}
