"""The totals of a leaf: its loss, its weight and whether a new buffer changed; and their summation.

They are summed in float32, in the order of the tree, like a gradient. They are plain numbers, rounded after each
addition as torch would round them: a tensor of six numbers costs ten times as much. A loss on another device than the
CPU stays there, and the host does not wait for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from operator import add
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "COUNT",
    "Totals",
    "TotalsRow",
    "add_rows",
    "as_tensor",
    "numbers_of",
    "rounded_sum",
    "row_of",
    "sent_to",
    "totals_of",
]

COUNT = 6
"""Numbers in a row: the loss, the high and low parts of the weight; and how many leaves changed a new buffer, have
further values, and belong to a rank that knows of another number of ranks."""

# A float32 counts exactly up to 2^24. Two of them, high and low part, count the tokens of any global batch.
_WEIGHT_BASE = 4096.0


class _DeviceRow(NamedTuple):
    """A row whose loss is on another device than the CPU."""

    loss: Tensor
    rest: array[float]


TotalsRow: TypeAlias = "array[float] | _DeviceRow"


class Totals(NamedTuple):
    """Sums over all leaves of a step, in tree order: equal on all ranks and on any number of them."""

    loss: float
    """Sum of the losses."""
    weight: float
    """Sum of the weights: samples, or tokens."""
    new_buffers: bool
    """True if a leaf changed a buffer that no earlier step had changed."""
    has_values: bool = False
    """True if the loss function gave further values for some leaf."""
    wants_resize: bool = False
    """True if a rank with a leaf knows that the number of ranks is to change."""


def row_of(
    loss: Tensor, weight: float, *, new_buffers: bool, has_values: bool = False, wants_resize: bool = False
) -> TotalsRow:
    """Return a leaf's totals as a row."""
    high = float(weight // _WEIGHT_BASE)
    low = weight - high * _WEIGHT_BASE
    if loss.device.type == "cpu":
        return array("f", (loss.item(), high, low, new_buffers, has_values, wants_resize))
    return _DeviceRow(loss.detach(), array("f", (high, low, new_buffers, has_values, wants_resize)))


def sent_to(device: torch.device, numbers: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return numbers of the host as a vector or matrix on a device, without waiting for what the device has to do."""
    # CUDA has read a few bytes of unpinned memory when the call returns, and does not wait for the stream.
    return torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True)


def add_rows(left: TotalsRow, right: TotalsRow) -> TotalsRow:
    """Return the sum of two rows."""
    if isinstance(left, _DeviceRow):
        assert isinstance(right, _DeviceRow)
        return _DeviceRow(left.loss + right.loss, rounded_sum(left.rest, right.rest))
    assert not isinstance(right, _DeviceRow)
    return rounded_sum(left, right)


def rounded_sum(left: Iterable[float], right: Iterable[float]) -> array[float]:
    """Return the sum of two rows of numbers, rounded to float32."""
    # A sum of two float32 is exact enough in Python's float64 to be rounded once.
    return array("f", map(add, left, right))


def as_tensor(row: TotalsRow) -> Tensor:
    """Return a row as a tensor, float32 of shape [COUNT], on the loss's device; a CPU's shares the row's memory."""
    if not isinstance(row, _DeviceRow):
        return torch.frombuffer(row, dtype=torch.float32)
    return torch.cat([row.loss.view(1), sent_to(row.loss.device, row.rest, torch.float32)])


def numbers_of(row: TotalsRow) -> list[float]:
    """Return a row as numbers of the host, which waits for the loss."""
    return [row.loss.item(), *row.rest] if isinstance(row, _DeviceRow) else row.tolist()


def totals_of(row: Iterable[float]) -> Totals:
    """Return the totals from a sum of rows."""
    loss, high, low, new_buffers, has_values, wants_resize = row
    return Totals(loss, high * _WEIGHT_BASE + low, new_buffers > 0, has_values > 0, wants_resize > 0)
