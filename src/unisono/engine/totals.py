"""What a leaf gives besides its gradient: loss, weight and whether a new buffer changed, and how they are summed.

They are summed in float32, in the order of the tree, like a gradient. A CPU's are plain numbers, rounded after each
addition as torch would round them: a tensor of four numbers costs ten times as much. Another device's stay there, and
are not waited for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from operator import add
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

__all__ = ["COUNT", "Totals", "TotalsRow", "add_rows", "as_tensor", "rounded_sum", "row_of", "totals_of"]

COUNT = 5
"""Numbers in a row: the loss, high and low part of the weight, how many leaves changed a new buffer, and how many gave
further values."""

# A float32 counts exactly up to 2^24. Two of them, high and low part, count the tokens of any global batch.
_WEIGHT_BASE = 4096.0

TotalsRow: TypeAlias = "array[float] | Tensor"


class Totals(NamedTuple):
    """Sums over all leaves of a step, in tree order: equal on all ranks and on any number of them."""

    loss: float
    """Sum of the losses."""
    weight: float
    """Sum of the weights: samples, or tokens."""
    new_buffers: bool
    """True if some leaf changed a buffer that no step before it had changed."""
    has_values: bool = False
    """True if the loss function gave further values for some leaf."""


def row_of(loss: Tensor, weight: float, *, new_buffers: bool, has_values: bool = False) -> TotalsRow:
    """Lay a leaf's totals out as a row."""
    high = float(weight // _WEIGHT_BASE)
    low = weight - high * _WEIGHT_BASE
    if loss.device.type == "cpu":
        return array("f", (loss.item(), high, low, new_buffers, has_values))
    row = torch.tensor([0.0, high, low, new_buffers, has_values], dtype=torch.float32, device=loss.device)
    row[0] = loss.detach()  # without waiting for the device
    return row


def add_rows(left: TotalsRow, right: TotalsRow) -> TotalsRow:
    """Add two rows; both may be used up."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return torch.add(left, right)  # type: ignore[arg-type]
    return rounded_sum(left, right)


def rounded_sum(left: Iterable[float], right: Iterable[float]) -> array[float]:
    """Add the numbers of two rows, as float32."""
    # A sum of two float32 is exact enough in Python's float64 to be rounded once.
    return array("f", map(add, left, right))


def as_tensor(row: TotalsRow) -> Tensor:
    """Show a row as a tensor, float32 of shape [COUNT]."""
    return row if isinstance(row, Tensor) else torch.frombuffer(row, dtype=torch.float32)


def totals_of(row: Iterable[float]) -> Totals:
    """Read a sum of rows."""
    loss, high, low, new_buffers, has_values = row
    return Totals(loss, high * _WEIGHT_BASE + low, new_buffers > 0, has_values > 0)
