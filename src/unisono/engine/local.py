"""The engine of a run with one rank, which has all leaves and sends nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine.base import Preparation, Trained, refuse_sparse
from unisono.engine.gradient_sum import GradientSum
from unisono.engine.node_sums import NodeSum, drop
from unisono.engine.sparse_tables import TableSums, check_optimizers, maps_of, split_sparse
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.totals import NOTHING, Totals, Wants, add_rows, numbers_of, row_of, totals_of
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.engine.update import prepare_whole, update_whole
from unisono.plan import Node

__all__ = ["LocalEngine"]


class LocalEngine:
    """Sums the leaves of one process. With one leaf, p.grad stays what autograd made: no copy, no extra memory."""

    divides_update = copies_weights = sends_early = False

    def __init__(self, optimizer: Optimizer, modules: Sequence[nn.Module], *, resumes: bool) -> None:
        self._optimizer, self._modules, self._resumes = optimizer, modules, resumes
        self._given = self._trained = Trained((), ())
        self._tables = TableSums(Trained((), ()))
        self._step = StepTransaction()
        self._leaves = 0
        self._gradients = GradientSum(Node(0, 0), resumes=resumes)
        self._totals = NodeSum(Node(0, 0), add=add_rows)
        self._only: tuple[Tensor, float, bool, bool, Wants] | None = None
        """The totals of a single leaf, with its loss still on the device."""

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step; see `Engine`."""
        if trained is not self._given:
            dense, tables = split_sparse(trained, self._modules)
            check_optimizers(self._optimizer, dense, tables)
            self._given, self._trained = trained, dense
            self._tables = TableSums(tables, maps=maps_of(self._optimizer, tables))
        elif self._tables.exist:  # otherwise no hyperparameter can have become wrong
            check_optimizers(self._optimizer, self._trained, self._tables.tables)
        self._step = step
        if leaves != self._leaves:
            self._leaves = leaves
            self._gradients = GradientSum(Node(0, leaves), resumes=self._resumes)
            self._totals = NodeSum(Node(0, leaves), add=add_rows)
        self._gradients.clear()
        self._totals.stack.clear()
        drop(trained.parameters)
        if self._tables.exist:
            self._tables.begin(NodeLayout(((Node(0, leaves),),), leaves))

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
        """Add a leaf's totals; see `Engine`."""
        if self._leaves == 1:
            self._only = loss, weight, new_buffers, has_values, wants
        else:
            row = row_of(loss, weight, new_buffers=new_buffers, has_values=has_values, wants=wants)
            self._totals.push(leaf, row)
            self._gradients.resume(leaf, self._trained.parameters)

    def close_leaf(self, leaf: int) -> None:
        """Add the gradients of one leaf; see `Engine`."""
        if self._leaves > 1:
            self._gradients.close_leaf(leaf, *self._trained)
        else:
            refuse_sparse(self._trained.names, [p.grad for p in self._trained.parameters])
        if self._tables.exist:
            self._tables.close_leaf(leaf)

    def flush(self) -> None:
        """Do nothing; see `Engine`."""

    def finish(self) -> Totals:
        """Complete the sums; see `Engine`."""
        self._step.run_deferred()
        if self._tables.exist:
            self._tables.collect(self._step)
        if self._leaves == 1:
            assert self._only is not None
            loss, weight, new_buffers, has_values, wants = self._only
            return Totals(loss.item(), weight, new_buffers, has_values, wants)
        for p, gradient in zip(self._trained.parameters, self._gradients.total(), strict=True):
            p.grad = gradient
        return totals_of(numbers_of(self._totals.total()))

    def prepare(self, preparation: Preparation) -> float | None:
        """Multiply, unscale and clip p.grad; see `Engine`."""
        if self._tables.exist:
            self._tables.check_room()
        return prepare_whole(self._given.parameters, self._optimizer, preparation)

    def update(self, scaler: torch.amp.GradScaler | None) -> None:
        """Write the weights; see `Engine`."""
        update_whole(self._optimizer, scaler, self._trained)

    def close(self) -> None:
        """Release the parameters; see `Engine`."""
        self._given = self._trained = Trained((), ())

    def abort(self, *, alike: bool) -> bool:
        """Discard the step; see `Engine`."""
        drop(self._given.parameters)
        return True
