"""Takes the gradients of this rank's leaves from the parameters and sums them, for engines of several ranks.

With overlap, gradients of the last leaf are taken while backward runs: their sums need not wait for another leaf.
Subclasses decide where sums are written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine.base import Trained, refuse_sparse
from unisono.engine.gradient_hooks import on_gradient
from unisono.engine.gradient_sum import GradientSum, twice_in_one_backward
from unisono.engine.node_sums import Gradients, NodeSum, add_one, take
from unisono.engine.sparse_tables import TableSums
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.totals import NOTHING, TotalsRow, Wants, add_rows, row_of
from unisono.engine.tree_all_reduce import NodeLayout, NodeLayouts

__all__ = ["GradientAccumulation"]


class GradientAccumulation(ABC):
    """Sums the leaves of one rank, node by node; has the calls of `Engine` that concern leaves."""

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Sequence[nn.Module],
        layouts: NodeLayouts,
        *,
        rank: int,
        overlap: bool,
        streams: bool = True,
    ) -> None:
        self._optimizer, self._modules = optimizer, modules
        self._overlap, self._streams = overlap, overlap and streams
        self._layouts, self._rank = layouts, rank
        self._layout = NodeLayout((), 0)
        self._step = StepTransaction()
        self._given = Trained((), ())
        """The parameters of a step, as passed to `start`."""
        self._trained = Trained((), ())
        """The parameters with dense gradients; the others are in `_tables`."""
        self._tables = TableSums(self._trained)
        self._sums: list[GradientSum] = []
        self._totals: list[NodeSum[TotalsRow]] = []
        self._used: list[list[bool]] = []
        """For each node and parameter, True if the parameter got a gradient there."""
        self._settled: list[bool] = []
        """For each parameter, True if its gradient of the last leaf has been taken."""
        self._node = 0
        """The number of the node of the leaf at hand."""
        self._streaming = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def close_forward(
        self,
        leaf: int,
        loss: Tensor,
        weight: float,
        *,
        new_buffers: bool,
        has_values: bool = False,
        wants: Wants = NOTHING,
    ) -> None:
        """Add a leaf's totals; if it is this rank's last leaf, let hooks take its gradients; see `Engine`."""
        row = row_of(loss, weight, new_buffers=new_buffers, has_values=has_values, wants=wants)
        self._node = i = self._node_of(leaf)
        self._totals[i].push(leaf, row)
        self._streaming = bool(self._hooks) and self._is_streamed(leaf)
        if not self._streaming:
            self._sums[i].resume(leaf, self._trained.parameters)

    def close_leaf(self, leaf: int) -> None:
        """Add the gradients of one leaf; see `Engine`."""
        self._streaming = False
        if self._tables.exist:
            self._tables.close_leaf(leaf)
        i = self._node_of(leaf)
        names, parameters = self._trained
        if leaf == self._sums[-1].node.stop - 1:
            self._sums[-1].settle(names, parameters)
            if self._hooks or self._sums[-1].stack:
                for index, p in enumerate(parameters):
                    if not self._settled[index]:
                        gradient, p.grad = p.grad, None
                        self._add_last_leaf(index, gradient)
                return
            gradients = take(parameters)
            refuse_sparse(names, gradients)
            self._used[i] = [gradient is not None for gradient in gradients]
            self._settled = [True] * len(gradients)
            self._store_leaf(gradients)
            return
        self._sums[i].close_leaf(leaf, names, parameters)
        if leaf == self._sums[i].node.stop - 1:
            self._used[i] = [gradient is not None for gradient in self._sums[i].total()]
            self._store_node(i)
            self._sums[i].clear()

    def close(self) -> None:
        """Release the parameters; see `Engine`."""
        self._unhook()

    def _unhook(self) -> None:
        """Remove the hooks from the parameters, and drop all references to the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._given = self._trained = Trained((), ())
        self._tables = TableSums(self._trained)

    def _begin(self, step: StepTransaction, layout: NodeLayout) -> None:
        """Begin a step with a given layout."""
        self._step, nodes = step, layout.nodes[self._rank]
        if self._tables.exist:
            self._tables.begin(layout)
        if layout is not self._layout:
            self._layout = layout
            self._sums = [GradientSum(node, resumes=self._overlap) for node in nodes]
            self._totals = [NodeSum(node, add=add_rows) for node in nodes]
        for i in range(len(nodes)):
            self._sums[i].clear()
            self._totals[i].stack.clear()
        self._used = [[False] * len(self._trained.parameters) for _ in nodes]
        self._settled = [False] * len(self._trained.parameters)
        self._streaming = False

    def _hook(self) -> None:
        """Register hooks, which take the gradients of last leaves while backward runs."""
        self._hooks = [on_gradient(p, self._on_gradient, index) for index, p in enumerate(self._trained.parameters)]

    def _is_streamed(self, leaf: int) -> bool:
        """Return True if hooks take the gradients of a leaf: those of the last one need not wait for another leaf."""
        return leaf == self._sums[-1].node.stop - 1

    def _node_of(self, leaf: int) -> int:
        if len(self._sums) == 1:
            return 0
        return next(i for i, total in enumerate(self._sums) if leaf < total.node.stop)

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if not self._streaming:
            return
        if self._settled[index]:
            raise twice_in_one_backward(self._trained.names[index])
        gradient, parameter.grad = parameter.grad, None
        self._add_last_leaf(index, gradient)

    def _add_last_leaf(self, index: int, gradient: Tensor | None) -> None:
        """Add the last leaf's gradient of one parameter to earlier leaves; `_store_sum` does the last addition."""
        refuse_sparse([self._trained.names[index]], [gradient])
        stack, left = self._sums[-1].stack, None
        for lefts in reversed(stack[1:]):
            gradient, lefts[index] = add_one(lefts[index], gradient), None
        if stack:
            left, stack[0][index] = stack[0][index], None
            if left is None or gradient is None:
                left, gradient = None, add_one(left, gradient)
        self._used[-1][index] = gradient is not None
        self._settled[index] = True
        self._store_sum(index, left, gradient)

    @abstractmethod
    def _store_sum(self, index: int, left: Tensor | None, gradient: Tensor | None) -> None:
        """Store one parameter's sum over the last node: left + gradient, gradient alone, or zero if both are None."""

    def _store_leaf(self, gradients: Gradients) -> None:
        """Store the gradients of a last node with a single leaf, of which hooks have taken none."""
        for index, gradient in enumerate(gradients):
            self._store_sum(index, None, gradient)

    @abstractmethod
    def _store_node(self, i: int) -> None:
        """Store the sums of all parameters over node number i, which is not the last one."""
