"""The values of buffers as one vector of float64, which ranks sum.

Floating-point values are summed for their mean. Whole numbers are those of leaf 0, to which the other leaves add zero;
each is sent as two halves, since a float64 holds 53 bits. There are many small buffers, so the cost is in calls of
torch: each leaf has its vector and the places in it for good.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.totals import sent_to

__all__ = ["BufferVector"]

_LOW = 0xFFFFFFFF


class _Vector(NamedTuple):
    """The vector of one leaf and the parts of it."""

    all: Tensor
    head: Tensor
    """The flags and the halves of whole numbers, first all high and then all low ones."""
    floating: list[Tensor]
    """One for each floating-point buffer."""


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
        self._vectors: dict[int, _Vector] = {}
        """By leaf."""

    def pack(self, values: Sequence[Tensor], changed: Sequence[bool], *, leaf: int) -> Tensor:
        """Return the vector of one leaf, which is valid until the next step. The caller may write to it.

        Args:
            values: The leaf's values of the buffers.
            changed: For each buffer, True if the leaf changed it.
            leaf: The number of the leaf.
        """
        vector = self._vectors.get(leaf)
        if vector is None:
            vector = self._vectors[leaf] = self._allocate()
        if self._floating and self._device.type == "cpu":
            torch._foreach_copy_(vector.floating, [values[k] for k in self._floating])
        elif self._floating:  # on a GPU, that would take a kernel for each
            vector.all[self._start :] = torch.cat([values[k].reshape(-1) for k in self._floating])
        whole = [] if leaf else [values[k] for k in self._whole]
        if self._has_counters_only:
            numbers = [int(value) for value in whole] or [0] * len(self._whole)
            head = [*changed, *(number >> 32 for number in numbers), *(number & _LOW for number in numbers)]
            vector.head.copy_(torch.frombuffer(array("d", head), dtype=torch.float64))
            return vector.all
        vector.head[: len(changed)] = sent_to(self._device, changed, torch.float64)
        if whole:
            joined = torch.cat([_as_int64(value).reshape(-1) for value in whole]).to(self._device)
            vector.head[len(changed) :] = torch.cat([joined >> 32, joined & _LOW])
        return vector.all

    def unpack(self, total: Tensor, *, leaves: int) -> tuple[list[bool], list[Tensor]]:
        """Return which buffers a leaf has changed, and the values of all buffers after a step of so many leaves.

        Floating-point values are of dtype float64.
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
            means = total[self._start : self.numel] / leaves
            values |= zip(self._floating, means.split_with_sizes(self._widths), strict=True)
        for k, dtype, part in zip(self._whole, self._dtypes, parts, strict=True):
            values[k] = part.view(torch.uint64) if dtype == torch.uint64 else part
        for k in self._reshaped:
            values[k] = values[k].view(self._shapes[k])
        return [flag > 0 for flag in changed], [values[k] for k in range(num)]

    def _allocate(self) -> _Vector:
        vector = torch.zeros(self.numel, dtype=torch.float64, device=self._device)
        parts = vector[self._start :].split_with_sizes(self._widths) if self._floating else ()
        floating = [part.view(self._shapes[k]) for part, k in zip(parts, self._floating, strict=True)]
        return _Vector(vector, vector[: self._start], floating)


def _as_int64(value: Tensor) -> Tensor:
    return value.view(torch.int64) if value.dtype == torch.uint64 else value.long()
