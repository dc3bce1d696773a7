"""Which ranks get which sums of a table whose rows are divided over ranks. Pure, but for looking at a table's map."""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.embedding.located_rows import LocatedRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.row_owners import RowOwners
from unisono.embedding.row_sums import SummedRows

__all__ = ["by_rank", "by_rank_and_news", "counted_by"]

_ALL = -1
"""Stands for the number of a rank."""


def by_rank(summed: SummedRows, owners: RowOwners, ranks: int) -> list[SummedRows]:
    """Return the sums of the rows that each rank keeps."""
    of_rows = owners.of(summed.rows)
    if owners.shift:
        return [_part(summed, owners.kept_by(rank, of_rows)) for rank in range(ranks)]
    of_rows, order = torch.sort(of_rows, stable=True)
    counts = torch.bincount(of_rows, minlength=ranks).tolist()
    rows, values = summed.rows[order], summed.values[order]
    return [*map(SummedRows, torch.split(rows, counts), torch.split(values, counts))]


def by_rank_and_news(
    summed: SummedRows, rows: RowMap, owners: RowOwners, ranks: int
) -> tuple[list[SummedRows], Tensor]:
    """Return the sums of a dynamic table that each rank gets, and the ids that may change the map.

    All ranks get those of ids to which this step gives a row, since nobody knows yet who has it. Those of ids that go
    on waiting are only needed for the whole gradient, so one rank gets them.
    """
    ids = summed.rows
    found = rows.find(ids)
    to = owners.of(found)
    if len(new := (found < 0).nonzero().view(-1)):
        of_new = ids[new]
        to[new] = torch.where(rows.are_admitted(of_new), _ALL, owners.of_new(of_new))
    parts = [_part(summed, owners.kept_by(rank, to) | (to == _ALL)) for rank in range(ranks)]
    return parts, ids if rows.policy.evicts else ids.index_select(0, new)


def counted_by(rank: int, total: SummedRows, rows: LocatedRows, owners: RowOwners) -> SummedRows:
    """Return those of a table's sums that count on a rank, where several ranks have the same ones.

    In a dynamic table, all ranks have those of new ids.
    """
    found = rows.numbers(total.rows)
    return _part(total, torch.where(found < 0, owners.of_new(total.rows), owners.of(found)) == rank)


def _part(summed: SummedRows, which: Tensor) -> SummedRows:
    places = which.nonzero().view(-1)
    return SummedRows(summed.rows.index_select(0, places), summed.values.index_select(0, places))
