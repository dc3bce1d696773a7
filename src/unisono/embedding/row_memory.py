"""Memory for rows."""

from __future__ import annotations

from torch import Tensor

from unisono.embedding.huge_pages import advise_huge_pages

__all__ = ["resized"]


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
