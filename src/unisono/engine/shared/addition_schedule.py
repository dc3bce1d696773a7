"""Plans and performs the additions of gradient rows; for all layouts of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.engine.tree_all_reduce import NodeLayout
from unisono.plan import fold

__all__ = ["AdditionSchedule", "add_at_once", "add_up"]

_CACHED = 65536
"""The number of elements that are summed at a time if they need more than one addition."""

Additions = Sequence[tuple[int, int]]
"""Pairs of sources to add, in order: the second to the first, in place."""


class AdditionSchedule:
    """The additions of one rank in a step, over the nodes of the tree that all ranks have.

    A source is the number of one of this rank's nodes, or -1 - r for row r. The part of a rank has a row for each node
    of the other ranks, in their order.
    """

    def __init__(self, layout: NodeLayout, rank: int) -> None:
        nodes = [(r, i) for r, of_rank in enumerate(layout.nodes) for i in range(len(of_rank))]
        self._rows = {node: row for row, node in enumerate(node for node in nodes if node[0] != rank)}
        sources = [i if r == rank else -1 - self._rows[r, i] for r, i in nodes]
        self.additions: list[tuple[int, int]] = []
        """Pairs of sources to add, in order: the second to the first, in place."""
        values = dict(zip((layout.nodes[r][i] for r, i in nodes), sources, strict=True))
        self.total = fold(values, leaves=layout.leaves, add=self._add)
        """The source that holds the sum at the end: the first row, unless this rank has all nodes."""
        self.sources = sorted({source for addition in self.additions for source in addition} | {self.total})

    def row(self, rank: int, i: int) -> int:
        """Return the row of another rank's node number i."""
        return self._rows[rank, i]

    @staticmethod
    def most_rows(widest: NodeLayout) -> int:
        """Count the rows that any rank's part needs in the widest step."""
        counts = [len(nodes) for nodes in widest.nodes]
        return max(sum(counts) - count for count in counts)

    def _add(self, left: int, right: int) -> int:
        # Into the first row, or otherwise into any row: this rank's own gradient need not be written again.
        target, other = (right, left) if right == -1 or left >= 0 > right else (left, right)
        self.additions.append((target, other))
        return target


def add_up(vectors: Mapping[int, list[Tensor]], additions: Additions, *, total: int, factor: float) -> None:
    """Perform the additions in place, and multiply the result by a factor.

    Args:
        vectors: The pieces of each source, the same pieces for all sources.
        additions: Pairs of sources.
        total: The source that holds the sum at the end.
        factor: The factor.
    """
    if len(additions) + (factor != 1.0) > 1:
        _in_cache(vectors, additions, total, factor)
    else:
        add_at_once(vectors, additions, total=total, factor=factor)


def add_at_once(vectors: Mapping[int, list[Tensor]], additions: Additions, *, total: int, factor: float) -> None:
    """Perform each addition over all pieces in turn, for data in the cache; see `add_up`. Pieces have any shape."""
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
                add_at_once(batch, additions, total=total, factor=factor)
                batch, filled = {source: [] for source in vectors}, 0
    if filled:
        add_at_once(batch, additions, total=total, factor=factor)
