"""The totals of a leaf: its loss, its weight and whether a new buffer changed; and their summation.

They are summed in float32, in the order of the tree, like a gradient. They are plain numbers, rounded after each
addition as torch would round them: a tensor of seven numbers costs ten times as much. A loss on another device than the
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
    "NOTHING",
    "Totals",
    "TotalsRow",
    "Wants",
    "add_rows",
    "as_tensor",
    "numbers_of",
    "rounded_sum",
    "row_of",
    "sent_to",
    "totals_of",
]

COUNT = 7
"""Numbers in a row: the loss, the high and low parts of the weight; and how many leaves changed a new buffer, have
further values, and belong to a rank that wants another number of ranks, or a checkpoint."""

# A float32 counts exactly up to 2^24. Two of them, high and low part, count the tokens of any global batch.
_WEIGHT_BASE = 4096.0


class _DeviceRow(NamedTuple):
    """A row whose loss is on another device than the CPU."""

    loss: Tensor
    rest: array[float]


TotalsRow: TypeAlias = "array[float] | _DeviceRow"


class Wants(NamedTuple):
    """What is to be done after a step by all ranks, though one rank alone may know it before."""

    resize: bool = False
    """True to change the number of ranks."""
    save: bool = False
    """True to write a checkpoint."""


NOTHING = Wants()


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
    wants: Wants = NOTHING
    """What a rank with a leaf wants to be done after the step."""

    @property
    def flags(self) -> tuple[bool, ...]:
        """All that are true or false, for `of`."""
        return self.new_buffers, self.has_values, *self.wants

    @classmethod
    def of(cls, loss: float, weight: float, counts: Iterable[float]) -> Totals:
        """Return totals of which each flag is true that is counted at least once.

        >>> Totals.of(0.5, 4.0, [0, 1, 0, 2]).flags
        (False, True, False, True)
        """
        new_buffers, has_values, *wants = (count > 0 for count in counts)
        return cls(loss, weight, new_buffers, has_values, Wants(*wants))


def row_of(
    loss: Tensor,
    weight: float,
    *,
    new_buffers: bool,
    has_values: bool = False,
    wants: Wants = NOTHING,
) -> TotalsRow:
    """Return a leaf's totals as a row."""
    high = float(weight // _WEIGHT_BASE)
    low = weight - high * _WEIGHT_BASE
    if loss.device.type == "cpu":
        return array("f", (loss.item(), high, low, new_buffers, has_values, *wants))
    return _DeviceRow(loss.detach(), array("f", (high, low, new_buffers, has_values, *wants)))


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
    loss, high, low, *counts = row
    return Totals.of(loss, high * _WEIGHT_BASE + low, counts)
