"""Writes to tensors that can be taken back."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["UndoLog"]


class UndoLog:
    """The contents of tensors before some writes."""

    def __init__(self) -> None:
        self._former: list[tuple[Tensor, Tensor, Tensor]] = []

    @torch.no_grad()
    def write(self, tensor: Tensor, places: Tensor, values: Tensor) -> None:
        """Write values to places of a tensor of one dimension; a place may be named twice with the same value."""
        self._former.append((tensor, places, tensor.index_select(0, places)))
        tensor.index_copy_(0, places, values.to(tensor.dtype).expand(len(places)))

    @torch.no_grad()
    def undo(self) -> None:
        """Put back what was there, and forget it."""
        for tensor, places, values in reversed(self._former):
            tensor.index_copy_(0, places, values)
        self._former = []

    def clear(self) -> None:
        """Forget the writes, which are kept."""
        self._former = []
