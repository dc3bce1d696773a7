"""The order of all sums: a fixed binary tree over the leaves 0, 1, … n-1.

A node covers an aligned run of leaves [k·2^j, (k+1)·2^j), cut off at n. Its value is left + right, or the left value
where nothing lies to the right. Any contiguous block of leaves consists of a few whole nodes (`nodes_of`): a rank sums
those, and the rest of the tree (`fold`) has the same bits whichever rank computes a node. This is pairwise summation,
whose rounding error grows with log n (N. J. Higham, "The accuracy of floating point summation", SIAM J. Sci. Comput.
14(4), 1993).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

__all__ = ["Node", "fold", "merges_after", "nodes_of"]

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree, identified by the leaves below it: start <= leaf < stop."""

    start: int
    stop: int


def nodes_of(block: range, *, leaves: int) -> list[Node]:
    """Return the largest whole nodes that make up a contiguous block of leaves, in order; else each leaf of the block.

    Leaves from number `leaves` on do not exist: a block that contains all existing leaves of a node contains the node.

    >>> nodes_of(range(2, 5), leaves=8)
    [Node(start=2, stop=4), Node(start=4, stop=5)]
    >>> nodes_of(range(4, 8), leaves=7)
    [Node(start=4, stop=7)]
    >>> nodes_of(range(1, 8, 3), leaves=7)
    [Node(start=1, stop=2), Node(start=4, stop=5)]
    """
    if block.step > 1:
        return [Node(leaf, leaf + 1) for leaf in block if leaf < leaves]
    nodes: list[Node] = []
    start, stop = block.start, min(block.stop, leaves)
    while start < stop:
        size = 1
        while start % (2 * size) == 0 and min(start + 2 * size, leaves) <= stop and start + size < leaves:
            size *= 2
        nodes.append(Node(start, min(start + size, leaves)))
        start += size
    return nodes


def merges_after(leaf: int, node: Node) -> int:
    """Return the number of additions that leaf number `leaf` of a node makes possible when leaves come in order.

    To sum a node, push each leaf onto a stack, then replace the top two entries by their sum this many times. At the
    end one entry is left, the node's value. The stack never holds more than log2(leaves) + 1 entries.

    >>> [merges_after(leaf, Node(0, 8)) for leaf in range(8)]
    [0, 1, 0, 2, 0, 1, 0, 3]
    >>> [merges_after(leaf, Node(4, 7)) for leaf in (4, 5, 6)]
    [0, 1, 1]
    """
    index = leaf - node.start
    if leaf == node.stop - 1:
        return index.bit_count()
    return ((index + 1) & -(index + 1)).bit_length() - 1


def fold(values: Mapping[Node, T], *, leaves: int, add: Callable[[T, T], T]) -> T:
    """Compute the value of the whole tree from the values of nodes that together cover all leaves.

    Args:
        values: The value of each node. Each is used once.
        leaves: The number of leaves of the tree.
        add: Called as `add(left, right)`; it may work in place on `left`.

    Raises:
        ValueError: The nodes do not cover all leaves, or `leaves` is less than 1.

    >>> fold({Node(0, 2): "(0 1)", Node(2, 3): "2", Node(3, 4): "3"}, leaves=4, add=lambda a, b: f"({a} {b})")
    '((0 1) (2 3))'
    """

    if leaves < 1:
        raise ValueError(f"leaves={leaves}: a tree has at least one leaf")
    return _value(values, 0, 1 << (leaves - 1).bit_length(), leaves, add)


def _value(values: Mapping[Node, T], start: int, size: int, leaves: int, add: Callable[[T, T], T]) -> T:
    known = values.get(Node(start, min(start + size, leaves)))
    if known is not None:
        return known
    half = size // 2
    if half == 0:
        raise ValueError(f"no given node covers leaf {start} of {leaves}")
    left = _value(values, start, half, leaves, add)
    return left if start + half >= leaves else add(left, _value(values, start + half, half, leaves, add))
