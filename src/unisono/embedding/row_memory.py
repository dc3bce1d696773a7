"""Memory for rows."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from unisono.embedding.huge_pages import advise_huge_pages

__all__ = ["RowStore", "resized"]

_WIDEST = {4: torch.complex128, 2: torch.float64}
"""A row is written as elements of this type, as each write of an element costs the same. By floats per element."""


def resized(tensor: Tensor, length: int) -> Tensor:
    """Return a copy of a tensor with another number of rows: fewer, or more of zeros.

    >>> import torch
    >>> resized(torch.tensor([1, 2]), 3).tolist()
    [1, 2, 0]
    """
    new = tensor.new_empty((length, *tensor.shape[1:]))
    advise_huge_pages(new)
    kept = min(length, len(tensor))
    new[:kept].copy_(tensor[:kept])
    new[kept:].zero_()
    return new


class RowStore(NamedTuple):
    """The rows of a table or of its state."""

    tensor: Tensor
    wide: torch.dtype | None
    """The type as which rows are written; None: their own."""

    @classmethod
    def of(cls, tensor: Tensor) -> RowStore:
        """Return the rows of a tensor, of whatever memory it has; or some of its columns."""
        wide = None
        if tensor.dim() == 2 and tensor.dtype == torch.float32 and tensor.stride(1) == 1:
            places = tensor.shape[1], tensor.stride(0), tensor.storage_offset()
            wide = next((t for n, t in _WIDEST.items() if not any(place % n for place in places)), None)
        return cls(tensor, wide)

    def read(self, which: Tensor, *, out: Tensor | None = None) -> Tensor:
        """Return copies of rows, in memory of their own or in `out`."""
        return torch.index_select(self.tensor, 0, which, out=out)

    def write(self, which: Tensor, rows: Tensor) -> None:
        """Write rows; none may be named twice."""
        if self.wide is None:
            self.tensor.index_copy_(0, which, rows)
        else:
            self.tensor.view(self.wide).index_copy_(0, which, rows.view(self.wide))
