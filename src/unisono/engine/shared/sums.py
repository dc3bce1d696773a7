"""Adding up rows of a gradient, piece by piece: what both ways of laying out rows end with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["add_up"]

_CACHED = 65536
"""Elements that are summed at a time where there is more to do with them than one addition."""

Additions = Sequence[tuple[int, int]]
"""Sources to add, in this order: the second to the first, in place."""


def add_up(
    vectors: Mapping[int, list[Tensor]], additions: Additions, *, total: int, factor: float, in_blocks: bool = True
) -> None:
    """Do the additions, and multiply their end by a factor.

    Args: vectors are the pieces of each source, the same ones of each. total is the source in which the sum ends.
        in_blocks is whether to do all with one block before the next: what is small is in the cache anyway, and need
        not be vectors then.
    """
    if in_blocks and len(additions) + (factor != 1.0) > 1:
        _in_cache(vectors, additions, total, factor)
    else:
        _at_once(vectors, additions, total, factor)


def _at_once(vectors: Mapping[int, list[Tensor]], additions: Additions, total: int, factor: float) -> None:
    for target, other in additions:
        torch._foreach_add_(vectors[target], vectors[other])
    if factor != 1.0:
        torch._foreach_mul_(vectors[total], factor)


def _in_cache(vectors: Mapping[int, list[Tensor]], additions: Additions, total: int, factor: float) -> None:
    batch: dict[int, list[Tensor]] = {source: [] for source in vectors}
    filled = 0
    for k in range(len(vectors[total])):
        blocks = {source: torch.split(of_all[k], _CACHED) for source, of_all in vectors.items()}
        for b, block in enumerate(blocks[total]):
            for source, of_piece in blocks.items():
                batch[source].append(of_piece[b])
            filled += len(block)
            if filled >= _CACHED:
                _at_once(batch, additions, total, factor)
                batch, filled = {source: [] for source in vectors}, 0
    if filled:
        _at_once(batch, additions, total, factor)
