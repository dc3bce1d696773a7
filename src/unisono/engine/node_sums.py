"""Sums of gradients, as lists of tensors with one entry per parameter, in the order of the plan's tree.

A parameter that got no gradient has the entry None. If another leaf gave one, None counts as +0.0 on every world size:
adding zero turns -0.0 into 0.0, so leaving the addition out on some world sizes would change bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from unisono.plan import Node, merges_after

__all__ = ["Gradients", "NodeSum", "add", "add_one", "drop", "take"]

Gradients = list[Tensor | None]
_T = TypeVar("_T")


def add_one(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients of one parameter, computed in place on one of them."""
    if left is None:
        return None if right is None else right.add_(0.0)
    return left.add_(0.0) if right is None else left.add_(right)


def add(left: Gradients, right: Gradients) -> Gradients:
    """Return the sum of two gradients, entry by entry, in place on either: both arguments are used up."""
    lefts, rights = [], []
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if a is not None and b is not None:
            lefts.append(a)
            rights.append(b)
        else:
            left[i] = add_one(a, b)
    if lefts:
        torch._foreach_add_(lefts, rights)
    return left


class NodeSum(Generic[_T]):
    """The running sum of one node's leaves, which come in order.

    Args:
        node: The node.
        add: Returns the sum of two values; it may use both up.
    """

    def __init__(self, node: Node, *, add: Callable[[_T, _T], _T]) -> None:
        self.node, self._add = node, add
        self.stack: list[_T] = []
        """The sums of finished subtrees, the leftmost first; at most log2(leaves) + 1 of them."""

    def push(self, leaf: int, value: _T) -> None:
        """Add the value of one leaf, which is used up."""
        for _ in range(merges_after(leaf, self.node)):
            value = self._add(self.stack.pop(), value)
        self.stack.append(value)

    def total(self) -> _T:
        """Return the node's value, once all of its leaves have been pushed."""
        (value,) = self.stack
        return value


def take(parameters: Iterable[Tensor]) -> Gradients:
    """Return the gradients of the parameters, and set p.grad to None."""
    gradients: Gradients = []
    for p in parameters:
        gradients.append(p.grad)
        p.grad = None
    return gradients


def drop(parameters: Iterable[Tensor]) -> None:
    """Set p.grad to None."""
    for p in parameters:
        p.grad = None
