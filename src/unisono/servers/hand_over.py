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

__all__ = ["TableUpdate", "packed_nbytes", "read_updates", "write_updates"]

_HEADER_NBYTES = 16
_SETTINGS_NBYTES = 512
"""The most that the settings of a table take, as JSON."""


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


def packed_nbytes(tables: Sequence[tuple[int, int, torch.dtype]]) -> int:
    """Return the most bytes that updates take. Args: for each table, the number of rows, their length and type."""
    sizes = (aligned(8 * n) + aligned(n * dim * dtype.itemsize) + _SETTINGS_NBYTES for n, dim, dtype in tables)
    return aligned(_HEADER_NBYTES) + sum(sizes)


def write_updates(slot: Tensor, step: int, updates: Sequence[TableUpdate]) -> None:
    """Write the updates of a step into memory, [nbytes], uint8."""
    settings = [
        {"table": update.table, "rows": len(update.rows), "step": update.step, "group": _plain(update.group)}
        for update in updates
    ]
    text = json.dumps(settings).encode()
    offset = aligned(_HEADER_NBYTES + len(text))
    slot[:_HEADER_NBYTES].view(torch.int64).copy_(torch.tensor([step, len(text)]))
    slot[_HEADER_NBYTES : _HEADER_NBYTES + len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for update in updates:
        for tensor in (update.rows, update.values):
            nbytes = tensor.numel() * tensor.element_size()
            slot[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            offset += aligned(nbytes)


def read_updates(slot: Tensor, step: int, shapes: Sequence[tuple[int, torch.dtype]]) -> list[TableUpdate]:
    """Return the updates in memory, as views of it. Args: shapes has the length and type of each table's rows."""
    written, length = slot[:_HEADER_NBYTES].view(torch.int64).tolist()
    assert written == step, f"the updates of step {step} are awaited here, and those of {written} found"
    text = bytes(slot[_HEADER_NBYTES : _HEADER_NBYTES + length].numpy())
    offset, updates = aligned(_HEADER_NBYTES + length), []
    for each in json.loads(text):
        dim, dtype = shapes[each["table"]]
        count = each["rows"]
        rows = slot[offset : offset + 8 * count].view(torch.int64)
        offset += aligned(8 * count)
        nbytes = count * dim * dtype.itemsize
        values = slot[offset : offset + nbytes].view(dtype).view(count, dim)
        offset += aligned(nbytes)
        updates.append(TableUpdate(each["table"], rows, values, each["group"], each["step"]))
    return updates


def _plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a rule reads. Numbers that a scheduler has made tensors become numbers."""
    wanted = [field.name for field in fields(rule_named(group["rule"]))]
    return {key: value.item() if isinstance(value := group[key], Tensor) else value for key in wanted}
