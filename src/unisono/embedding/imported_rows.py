"""Rows whose values come from elsewhere, such as pretrained vectors; and rows that were written where nobody reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from unisono.embedding.growth import resize
from unisono.embedding.id_checks import check_ids
from unisono.embedding.row_map import RowMap
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.errors import UnisonoError
from unisono.text import a_type

__all__ = ["import_rows", "refuse_lost_rows"]

_CHUNK_NBYTES = 64 << 20


@torch.no_grad()
def import_rows(table: nn.Module, ids: Tensor, values: Tensor) -> None:
    """Give rows of a table values that were computed elsewhere, such as pretrained vectors; see `export_rows`.

    Call it before a Trainer or `share_tables` has the table, with the same on every rank; in a loop of one process,
    also between steps. The rows then have values of their own, as after an update. In a dynamic table each id gets a
    row, also one that `admit_after` would let wait; none is given up for it, and a table that grows does so if it has
    not been trained yet. Memory: some numbers for each id.

    Args:
        table: One of `Tables`.
        ids: The ids, [n], int32 or int64, each once.
        values: Their values, [n, dim]. They get the type of the table.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Shapes do not fit each other, an id comes twice, or is the padding of a dynamic table.
        IndexError: An id is out of range in a fixed table.
        TableFullError: A dynamic table has no room for all ids. Nothing has been changed.
        UnisonoError: Other ranks or servers have the rows already.
    """
    if not isinstance(table, RowTable | BagTable):
        raise TypeError(f"table is {a_type(table)}; give one of unisono.embedding.Tables, such as tables['item']")
    _check_own(table)
    check_ids(table.name, ids, rows=table.table.rows, are_looked_up=False)
    _check_values(table, ids, values)
    weight, rows = table.weight.detach(), table.rows
    ids = ids.to(weight.device, torch.int64)
    places = ids
    if isinstance(rows, RowMap):
        _make_room(table, rows, ids)
        places = rows.admit(ids)
    elif rows is not None:
        rows.place(ids)
    table.weight.index_copy_(0, places, values.to(weight.device, weight.dtype))


def _check_own(table: RowTable | BagTable) -> None:
    """Refuse rows that others have, too.

    Raises:
        UnisonoError: They have.
    """
    is_divided = table.rows is not None and table.rows.owners is not None
    if table.serving is not None or is_divided or (table.file is not None and table.file.is_shared):
        raise UnisonoError(
            f"the rows of table {table.name!r} are on servers, divided over ranks, or in a file of all ranks: import "
            "rows before the Trainer is made or share_tables is called, on every rank"
        )


def _check_values(table: RowTable | BagTable, ids: Tensor, values: Tensor) -> None:
    if not isinstance(values, Tensor) or not values.is_floating_point():
        told = f"of {values.dtype}" if isinstance(values, Tensor) else a_type(values)
        raise TypeError(f"values are {told}; table {table.name!r} takes a tensor of floating-point numbers")
    dim = table.weight.shape[1]
    if ids.dim() != 1 or list(values.shape) != [len(ids), dim]:
        raise ValueError(
            f"ids have the shape {list(ids.shape)}, and values {list(values.shape)}: table {table.name!r} takes [n] "
            f"and [n, {dim}]"
        )
    distinct, counts = torch.unique(ids, return_counts=True)
    if len(distinct) != len(ids):
        repeated = int(distinct[counts > 1][0])
        raise ValueError(f"id {repeated} comes {int(counts.max())} times, and a row has one value: name each id once")
    if table.table.capacity is not None and table.padding_idx is not None and (ids == table.padding_idx).any():
        raise ValueError(f"id {table.padding_idx} is padding_idx of table {table.name!r}, which gets no row")


def _make_room(table: RowTable | BagTable, rows: RowMap, ids: Tensor) -> None:
    """Let a table grow that has not been trained yet; of one that has, an optimizer keeps state of its length."""
    wanted = rows.count + int((rows.find(ids) < 0).sum())
    if wanted > len(table.weight) and table.table.when_full == "grow" and not rows.is_trained:
        resize(table.weight, rows, max(2 * len(table.weight), wanted))


def refuse_lost_rows(tables: Iterable[RowTable | BagTable]) -> None:
    """Refuse tables in memory of which rows were written that read as their first values all the same.

    Cost: nothing for a table that was not written to since it was made; otherwise one pass over it.

    Raises:
        ValueError: There is one.
    """
    for table in tables:
        weight, rows = table.weight.detach(), table.rows
        is_here = table.file is None and table.serving is None and not weight.is_inference()
        if rows is None or rows.owners is not None or not is_here or not weight._version:
            continue
        chunk = max(1, _CHUNK_NBYTES // (weight.shape[1] * weight.element_size()))
        for start in range(0, len(weight), chunk):
            some = weight[start : start + chunk]
            lost = (some != 0).any(1).logical_and_(rows.present(start, start + len(some)) == 0).nonzero()
            if len(lost):
                raise ValueError(
                    f"row {start + int(lost[0])} of table {table.name!r} was written, and reads as its first values "
                    "all the same, since no id has it or it has not been updated: give rows values by "
                    "unisono.embedding.import_rows(table, ids, values), or leave out init_std= and capacity="
                )
