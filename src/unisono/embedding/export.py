"""Files with the rows of a table and their ids, for other programs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.embedding.located_rows import ReadRows
from unisono.embedding.row_map import RowMap
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.machine import read_ahead
from unisono.state.row_column import RowColumn
from unisono.state.weight_files import write_rows
from unisono.text import a_type

__all__ = ["export_rows"]

_SUFFIXES = (".safetensors", ".npz")
_CHUNK_NBYTES = 4 << 20


def export_rows(table: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the rows of a table and their ids into a file, which is complete under its name or not there.

    It has `ids`, [n], int64, ascending, and `weight`, [n, dim]. Of a dynamic table, these are the ids that have a row.
    Rows that have not been written yet have their first values.
    No rank waits for another: call it on one, between two steps. But if the rows are divided over the ranks of a
    Trainer, every rank must call it, and rank 0 writes. Memory: the ids, and 64 MiB.

    Args:
        table: One of `Tables`.
        path: A name that ends in .safetensors, or in .npz for numpy.load. A folder that does not exist is made.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: path has another suffix.
        CheckpointError: The file cannot be written. One of that name is as it was.
    """
    if not isinstance(table, RowTable | BagTable):
        raise TypeError(f"table is {a_type(table)}; give one of unisono.embedding.Tables, such as tables['item']")
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path={path!r} must be the path of a file, and is {a_type(path)}")
    file = Path(os.fspath(path))
    if file.suffix not in _SUFFIXES:
        raise ValueError(f"path={str(path)!r} must say by its suffix what to write: {' or '.join(_SUFFIXES)}")
    if table.serving is not None:
        table.serving.settle()
    rows = table.rows
    if rows is not None and rows.collect is not None:
        rows.collect(lambda read: write_rows(file, _columns_of(table, read)))
        return
    write_rows(file, _columns_of(table))


def _columns_of(table: RowTable | BagTable, read: ReadRows | None = None) -> dict[str, RowColumn]:
    """Return what is written; `read` reads rows that are divided over ranks."""
    weight, rows = table.weight.detach(), table.rows
    if isinstance(rows, RowMap):
        places = rows.in_order()
        ids = rows.ids.detach().index_select(0, places)
    else:
        ids, places = torch.arange(len(weight)), None
    chunk = max(1, _CHUNK_NBYTES // (weight.shape[1] * weight.element_size()))

    def values() -> Iterator[Tensor]:
        for start in range(0, len(ids), chunk):
            some = slice(start, start + chunk)
            if read is not None:
                assert rows is not None
                found, has_values = read(start, min(start + chunk, len(ids)))
                new = (has_values == 0).nonzero().view(-1)
                yield found.index_copy_(0, new, rows.first_values(ids[some][new], weight, padding=table.padding_idx))
                continue
            if places is None and weight.device.type == "cpu":
                ahead = weight[start : start + 2 * chunk]
                read_ahead(ahead.data_ptr(), ahead.nbytes)
            if places is not None:
                yield weight.index_select(0, places[some]).cpu()
            elif rows is not None:
                source, found = rows.locate(weight, ids[some], padding=table.padding_idx)
                yield source.index_select(0, found)
            else:
                yield weight[some].cpu().contiguous()

    form = torch.empty((len(ids), weight.shape[1]), dtype=weight.dtype, device="meta")
    return {"ids": RowColumn(ids, lambda: iter([ids.cpu()])), "weight": RowColumn(form, values)}
