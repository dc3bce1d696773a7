"""The values of buffers as one vector of float64, which ranks sum.

Floating-point values are summed for their mean. Whole numbers are those of leaf 0, to which the other leaves add zero;
each is sent as two halves, since a float64 holds 53 bits. There are many small buffers, so the cost is in calls of
torch: each leaf has its vector and the places in it for good.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from unisono.engine.totals import sent_to

__all__ = ["BufferVector", "LeafValues"]

_LOW = 0xFFFFFFFF


class _LeafVector(NamedTuple):
    """The vector of one leaf and the parts of it."""

    all: Tensor
    head: Tensor
    """The flags and the halves of whole numbers, first all high and then all low ones."""
    floating: list[Tensor]
    """On the CPU, one for each floating-point buffer."""


class _LeafVectors(NamedTuple):
    """The vectors of some leaves in one matrix."""

    all: Tensor
    rows: list[_LeafVector]


LeafValues: TypeAlias = tuple[Sequence[Tensor], Sequence[bool]]
"""A leaf's values of the buffers, and for each buffer True if the leaf changed it."""


class BufferVector:
    """The places of some buffers in the vector: a flag for each, then whole numbers, then floating-point values.

    Args:
        buffers: The buffers, whose shapes and dtypes count.
        device: The device of the vector.
    """

    def __init__(self, buffers: Sequence[Tensor], device: torch.device) -> None:
        self._device = device
        self._shapes = [buffer.shape for buffer in buffers]
        self._floating = [k for k, buffer in enumerate(buffers) if buffer.is_floating_point()]
        self._whole = [k for k, buffer in enumerate(buffers) if not buffer.is_floating_point()]
        self._dtypes = [buffers[k].dtype for k in self._whole]
        mean_dtypes = {buffers[k].dtype for k in self._floating}
        self._mean_dtype = mean_dtypes.pop() if len(mean_dtypes) == 1 else torch.float64
        self._widths = [buffers[k].numel() for k in self._floating]
        self._whole_widths = [buffers[k].numel() for k in self._whole]
        # Counters of norm layers, of which a Python number takes less time than a tensor.
        is_counter = [buffers[k].dtype == torch.int64 and buffers[k].numel() == 1 for k in self._whole]
        self._has_counters_only = device.type == "cpu" and all(is_counter)
        # Parts of the vector have one dimension, and counters as they are unpacked none.
        unpacked = dict.fromkeys(self._whole, 0) if self._has_counters_only else {}
        self._reshaped = [k for k, shape in enumerate(self._shapes) if len(shape) != unpacked.get(k, 1)]
        self._start = len(buffers) + 2 * sum(self._whole_widths)
        """The place of the first floating-point value."""
        self.numel = self._start + sum(self._widths)
        """The length of the vector."""
        self._memory: dict[tuple[int, int], _LeafVectors] = {}
        """By the first leaf and their number."""

    def pack(self, leaves: Sequence[LeafValues], *, first: int) -> list[Tensor]:
        """Return the vectors of some leaves, which are valid until the next step. The caller may write to them.

        Args:
            leaves: What each leaf has made of the buffers.
            first: The number of the first leaf; the others follow it.
        """
        memory = self._memory.get((first, len(leaves)))
        if memory is None:
            memory = self._memory[first, len(leaves)] = self._allocate(len(leaves))
        if self._floating and self._device.type == "cpu":
            for row, (values, _) in zip(memory.rows, leaves, strict=True):
                torch._foreach_copy_(row.floating, [values[k] for k in self._floating])
        elif self._floating:  # on a GPU, that would take a kernel for each
            joined = torch.cat([values[k].reshape(-1) for values, _ in leaves for k in self._floating])
            memory.all[:, self._start :] = joined.view(len(leaves), -1)
        flags = [changed for _, changed in leaves]
        whole = [leaves[0][0][k] for k in self._whole] if first == 0 else []
        if self._has_counters_only:
            numbers = [int(value) for value in whole] or [0] * len(self._whole)
            halves = [*(number >> 32 for number in numbers), *(number & _LOW for number in numbers)]
            for row, changed in zip(memory.rows, flags, strict=True):
                row.head.copy_(torch.frombuffer(array("d", [*changed, *halves]), dtype=torch.float64))
                halves = [0] * len(halves)
            return [row.all for row in memory.rows]
        memory.all[:, : len(self._shapes)] = sent_to(self._device, flags, torch.float64)
        if whole:
            high_and_low = torch.cat([_as_int64(value).reshape(-1) for value in whole]).to(self._device)
            memory.all[0, len(self._shapes) : self._start] = torch.cat([high_and_low >> 32, high_and_low & _LOW])
        return [row.all for row in memory.rows]

    def unpack(self, total: Tensor, *, leaves: int) -> tuple[list[bool], list[Tensor]]:
        """Return which buffers a leaf has changed, and the values of all buffers after a step of so many leaves.

        Floating-point values have the dtype of the buffers if all have the same, and float64 otherwise.
        """
        head, num = total[: self._start], len(self._shapes)
        if self._has_counters_only:
            numbers = head.tolist()
            counts = len(self._whole)
            halves = zip(numbers[num : num + counts], numbers[num + counts :], strict=True)
            changed = numbers[:num]
            joined = array("q", [int(high) << 32 | int(low) for high, low in halves])
            parts = torch.frombuffer(joined, dtype=torch.int64).unbind() if joined else ()
        else:
            changed = head[:num].tolist()
            high, low = head[num:].long().chunk(2)
            parts = ((high << 32) | low).split_with_sizes(self._whole_widths)
        values: dict[int, Tensor] = {}
        if self._floating:
            means = (total[self._start : self.numel] / leaves).to(self._mean_dtype)
            values |= zip(self._floating, means.split_with_sizes(self._widths), strict=True)
        for k, dtype, part in zip(self._whole, self._dtypes, parts, strict=True):
            values[k] = part.view(torch.uint64) if dtype == torch.uint64 else part
        for k in self._reshaped:
            values[k] = values[k].view(self._shapes[k])
        return [flag > 0 for flag in changed], [values[k] for k in range(num)]

    def _allocate(self, leaves: int) -> _LeafVectors:
        matrix = torch.zeros(leaves, self.numel, dtype=torch.float64, device=self._device)
        return _LeafVectors(matrix, [self._row(vector) for vector in matrix.unbind()])

    def _row(self, vector: Tensor) -> _LeafVector:
        floating: list[Tensor] = []
        if self._floating and self._device.type == "cpu":
            parts = vector[self._start :].split_with_sizes(self._widths)
            floating = [part.view(self._shapes[k]) for part, k in zip(parts, self._floating, strict=True)]
        return _LeafVector(vector, vector[: self._start], floating)


def _as_int64(value: Tensor) -> Tensor:
    return value.view(torch.int64) if value.dtype == torch.uint64 else value.long()
