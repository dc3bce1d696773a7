"""Files with the rows of a table and their ids, for other programs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, nn

from unisono.embedding.table_modules import BagTable, RowTable
from unisono.state.weight_files import write_rows
from unisono.text import a_type

__all__ = ["export_rows"]

_SUFFIXES = (".safetensors", ".npz")


def export_rows(table: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the rows of a table and their ids into a file, which is complete under its name or not there.

    It has `ids`, [n], int64, ascending, and `weight`, [n, dim]. Of a dynamic table, these are the ids that have a row.
    No rank waits for another: call it on one, between two steps. Memory: a copy of the rows that are written.

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
    ids, weight = _rows_of(table)
    write_rows(file, {"ids": ids, "weight": weight})


def _rows_of(table: RowTable | BagTable) -> tuple[Tensor, Tensor]:
    weight = table.weight.detach()
    if table.rows is None:
        return torch.arange(len(weight)), weight.cpu().contiguous()
    taken = table.rows.taken
    ids, order = torch.sort(table.rows.ids.detach().index_select(0, taken))
    return ids.cpu(), weight.index_select(0, taken[order]).cpu()
