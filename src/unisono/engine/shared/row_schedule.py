"""The additions that finish the tree from rows of numbers, of which every rank has one for each of its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unisono.engine.tree_all_reduce import NodeLayout
from unisono.plan import fold

__all__ = ["RowSchedule"]


class RowSchedule(NamedTuple):
    """The additions of a step in which every rank adds all rows. It is kept, since planning takes longer than adding.

    >>> layout = NodeLayout.of(leaves=4, world_size=2, virtual_ranks=4)
    >>> RowSchedule.of(layout, firsts=[0, 1], num_rows=2)
    RowSchedule(rows=[0, 1], additions=[(0, 1)], last=2)
    """

    rows: list[int]
    """The rows of the nodes that the step has."""
    additions: list[tuple[int, int]]
    """The operands of each addition, by number: rows come first, then the sums in their order."""
    last: int
    """The number of the total."""

    @classmethod
    def of(cls, layout: NodeLayout, *, firsts: Sequence[int], num_rows: int) -> RowSchedule:
        """Plan a step. Pure.

        Args:
            layout: The nodes of each rank.
            firsts: The first row of each rank.
            num_rows: The number of all rows, including those that the step does not use.
        """
        additions: list[tuple[int, int]] = []

        def add(left: int, right: int) -> int:
            additions.append((left, right))
            return num_rows + len(additions) - 1

        of_ranks = zip(firsts, layout.nodes, strict=True)
        rows = {node: first + i for first, nodes in of_ranks for i, node in enumerate(nodes)}
        last = fold(rows, leaves=layout.leaves, add=add)
        return cls(list(rows.values()), additions, last)
