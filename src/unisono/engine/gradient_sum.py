"""The running sum of a node's gradients, of which autograd does the first addition of a leaf itself.

A leaf's gradients are as large as the model. Added after the backward pass, each has gone to memory, and comes back
from there. Where p.grad is the sum of earlier leaves instead, autograd adds each gradient while it is in the cache, to
the same bits: left + right. That goes for half of all additions of a node, those of a leaf to what is on top of the
stack.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from unisono.engine.base import refuse_sparse
from unisono.engine.node_sums import Gradients, NodeSum, add, add_one, take
from unisono.errors import LossError
from unisono.plan import Node, merges_after

__all__ = ["GradientSum", "twice_in_one_backward"]


class GradientSum(NodeSum[Gradients]):
    """The running sum of the gradients of one node's leaves, which come in order.

    Args:
        node: The node.
        resumes: If False, all additions are made after backward passes.
    """

    def __init__(self, node: Node, *, resumes: bool) -> None:
        super().__init__(node, add=add)
        self._resumes = resumes
        self._left: Gradients | None = None
        """The sum that p.grad had before the backward pass of the leaf, whose addition autograd does."""
        self._versions: list[int] = []

    def clear(self) -> None:
        """Begin anew."""
        self.stack.clear()
        self._left = None

    def resume(self, leaf: int, parameters: Sequence[Tensor]) -> None:
        """Just before the last backward pass of a leaf: let it add to the sum so far, if that has the same bits.

        It has not if an earlier backward pass of the leaf has left gradients, which are to be added to those of this
        one first. A user's hook that reads or changes p.grad finds the gradients of the leaf alone there.
        """
        if not (self._resumes and self.stack and merges_after(leaf, self.node)):
            return
        for p in parameters:
            if p.grad is not None or ((hooks := p._post_accumulate_grad_hooks) and _are_foreign(hooks)):
                return
        self._left = left = self.stack.pop()
        self._versions = [0 if gradient is None else gradient._version for gradient in left]
        for p, gradient in zip(parameters, left, strict=True):
            p.grad = gradient

    def close_leaf(self, leaf: int, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """Add the gradients of a leaf, and set p.grad to None.

        Raises:
            LossError: A gradient is sparse, or was added in two parts, so that the sum has other bits.
        """
        merges = merges_after(leaf, self.node) - (self._left is not None)
        self.settle(names, parameters)
        gradients = take(parameters)
        refuse_sparse(names, gradients)
        for _ in range(merges):
            gradients = add(self.stack.pop(), gradients)
        self.stack.append(gradients)

    def settle(self, names: Sequence[str], parameters: Sequence[Tensor]) -> None:
        """After a leaf's last backward pass: complete p.grad where the leaf, or those before, gave no gradient.

        Raises:
            LossError: A gradient was added in two parts.
        """
        left, self._left = self._left, None
        if left is None:
            return
        for name, p, before, version in zip(names, parameters, left, self._versions, strict=True):
            gradient = p.grad
            if before is None:
                add_one(None, gradient)
            elif gradient is before:
                added = before._version - version
                if not added:
                    add_one(before, None)
                elif added > 1:
                    raise twice_in_one_backward(name)


def twice_in_one_backward(name: str) -> LossError:
    """Return the error for a parameter whose gradient comes in two parts, which are added in another order then."""
    return LossError(
        f"parameter {name!r} got its gradient twice in one backward, the second time after the first had been taken. "
        "Re-entrant activation checkpointing does that: call checkpoint with use_reentrant=False, or give the Trainer "
        "overlap=False."
    )


def _are_foreign(hooks: dict[int, object]) -> bool:
    """Return True if some hooks are none of `gradient_hooks.on_gradient`."""
    return any(not hasattr(hook, "owner") for hook in hooks.values())
