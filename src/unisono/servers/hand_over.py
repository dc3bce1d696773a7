"""The updates that a rank hands to servers in a step: rows of each table, their gradients, and optimizer settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.embedding.row_optimizers import rule_named
from unisono.shm.segment import aligned

__all__ = ["RowLayout", "TableUpdate", "packed_nbytes", "read_updates", "write_updates"]

_HEADER_NBYTES = 16
_SETTINGS_NBYTES = 512
"""The most that the settings of a table take, as JSON."""


class RowLayout(NamedTuple):
    """What an update has for each row of a table."""

    dim: int
    """The length of a gradient."""
    dtype: torch.dtype
    """Its type, and that of the numbers."""
    numbers: int = 0
    """How many numbers of a row servers compute for each other; see `row_numbers.py`."""

    def nbytes(self, rows: int) -> int:
        """Return the bytes of so many rows, without settings."""
        of_one = self.dim * self.dtype.itemsize, self.numbers * self.dtype.itemsize
        return aligned(8 * rows) + sum(aligned(rows * each) for each in of_one)


class TableUpdate(NamedTuple):
    """The update of some rows of one table."""

    table: int
    """The number of the table in the session."""
    rows: Tensor
    """[n], int64, ascending, all different."""
    values: Tensor
    """Their gradients, [n, dim]."""
    group: Mapping[str, Any]
    """The settings of the optimizer."""
    step: float
    """The number of the table's update."""
    numbers: Tensor | None = None
    """Where servers put numbers of whole rows, [numbers, n]."""


def packed_nbytes(tables: Sequence[tuple[int, RowLayout]]) -> int:
    """Return the most bytes that updates take. Args: for each table, the number of rows, and what each has."""
    return aligned(_HEADER_NBYTES) + sum(layout.nbytes(rows) + _SETTINGS_NBYTES for rows, layout in tables)


def write_updates(slot: Tensor, step: int, updates: Sequence[TableUpdate], layouts: Sequence[RowLayout]) -> None:
    """Write the updates of a step into memory, [nbytes], uint8. Args: layouts has what a row of each table has."""
    settings = [
        {"table": update.table, "rows": len(update.rows), "step": update.step, "group": _plain(update.group)}
        for update in updates
    ]
    text = json.dumps(settings).encode()
    offset = aligned(_HEADER_NBYTES + len(text))
    slot[:_HEADER_NBYTES].view(torch.int64).copy_(torch.tensor([step, len(text)]))
    slot[_HEADER_NBYTES : _HEADER_NBYTES + len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for update in updates:
        end = offset + layouts[update.table].nbytes(len(update.rows))
        for tensor in (update.rows, update.values):
            nbytes = tensor.numel() * tensor.element_size()
            slot[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            offset += aligned(nbytes)
        offset = end


def read_updates(slot: Tensor, step: int, layouts: Sequence[RowLayout]) -> list[TableUpdate]:
    """Return the updates in memory, as views of it. Args: layouts has what a row of each table has."""
    written, length = slot[:_HEADER_NBYTES].view(torch.int64).tolist()
    assert written == step, f"the updates of step {step} are awaited here, and those of {written} found"
    text = bytes(slot[_HEADER_NBYTES : _HEADER_NBYTES + length].numpy())
    offset, updates = aligned(_HEADER_NBYTES + length), []
    for each in json.loads(text):
        dim, dtype, wanted = layouts[each["table"]]
        count = each["rows"]
        rows = slot[offset : offset + 8 * count].view(torch.int64)
        offset += aligned(8 * count)
        nbytes = count * dim * dtype.itemsize
        values = slot[offset : offset + nbytes].view(dtype).view(count, dim)
        offset += aligned(nbytes)
        nbytes = count * wanted * dtype.itemsize
        numbers = slot[offset : offset + nbytes].view(dtype).view(wanted, count)
        offset += aligned(nbytes)
        updates.append(TableUpdate(each["table"], rows, values, each["group"], each["step"], numbers))
    return updates


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a rule reads. Numbers that a scheduler has made tensors become numbers."""
    wanted = [field.name for field in fields(rule_named(group["rule"]))]
    return {key: value.item() if isinstance(value := group[key], Tensor) else value for key in wanted}
