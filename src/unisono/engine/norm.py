"""The global norm of a gradient, with the same bits on any number of ranks and in every engine.

Each parameter's gradient is cut, in memory order and from its beginning, into blocks of a fixed size. A rank computes
the norm of each of its blocks separately. The squares are then added exactly (math.fsum), so that the order does not
matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK", "block_norms", "blocks_of", "clip_factor", "dense_strides", "global_norm", "in_memory_order"]

BLOCK = 16384
"""The number of elements in a block. Ranks divide parameters at multiples of it."""


def dense_strides(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides that autograd gives a gradient: the parameter's if it is dense, otherwise contiguous ones."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return torch.empty(parameter.shape, device="meta").stride()
            expected *= size
    return parameter.stride()


def in_memory_order(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a gradient as a vector in memory order: a view if it has the given strides, otherwise a copy."""
    if gradient.is_contiguous() and (gradient.stride() == strides or gradient.dim() < 2):
        return gradient.view(-1)
    if gradient.stride() != strides:
        gradient = gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())


def run_of(gradient: Tensor, strides: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` of `in_memory_order`, without `stop`."""
    if gradient.stride() == strides:  # half the time of a slice
        return gradient.as_strided((stop - start,), (1,), gradient.storage_offset() + start)
    return in_memory_order(gradient, strides)[start:stop]


def blocks_of(vector: Tensor) -> Sequence[Tensor]:
    """Cut a vector into blocks. It must begin where a block of its parameter begins."""
    return torch.split(vector, BLOCK) if vector.numel() else ()


def block_norms(blocks: Sequence[Tensor]) -> Tensor:
    """Return the norm of each block, float64 of shape [blocks]. Norms of low precision are computed in float32.

    They are on the device of the first block, if blocks are on several.
    """
    norms = torch.zeros(len(blocks), dtype=torch.float64, device=blocks[0].device if blocks else None)
    for dtype, device in {(b.dtype, b.device) for b in blocks}:
        chosen = [i for i, b in enumerate(blocks) if b.dtype == dtype and b.device == device]
        reals = [torch.view_as_real(blocks[i]) if dtype.is_complex else blocks[i] for i in chosen]
        wide = dtype.to_real() if dtype.to_real().itemsize >= 4 else torch.float32
        norms[chosen] = torch.stack(torch._foreach_norm(reals, 2, wide)).double().to(norms.device)
    return norms


def global_norm(norms: Sequence[float]) -> float:
    """Return the global norm from the norms of all blocks.

    >>> global_norm([3.0, 4.0, 0.0])
    5.0
    """
    return math.sqrt(math.fsum(norm * norm for norm in norms))


def clip_factor(norm: float, bound: float) -> float:
    """Return the factor by which torch.nn.utils.clip_grad_norm_ multiplies a gradient.

    >>> clip_factor(1.0, 2.0), round(clip_factor(4.0, 2.0), 3)
    (1.0, 0.5)
    """
    return min(1.0, bound / (norm + 1e-6))
