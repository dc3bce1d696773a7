"""The gradient of a step in shared memory, until it is ready for the update.

Each rank writes the sums of its leaves into rows, waits for those of the others, and then sums its own part of all
parameters: before clipping, loss scaling and hooks of the user if there are any, otherwise in the update itself. The
calls of a step before and after that are in `shared_engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine.accumulation import GradientAccumulation
from unisono.engine.base import Preparation
from unisono.engine.joint_optimizer import parts_of
from unisono.engine.node_sums import Gradients
from unisono.engine.norm import block_norms, blocks_of, clip_factor, dense_strides, global_norm, in_memory_order
from unisono.engine.optimizer_hooks import has_post_hooks, has_pre_hooks
from unisono.engine.shared.gradient_rows import GradientRows
from unisono.engine.shared.partition import Piece
from unisono.engine.shared.shared_consistency import SharedConsistencyCheck
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.shared.step_metadata import StepMetadata, unscale
from unisono.engine.totals import Totals
from unisono.engine.tree_all_reduce import NodeLayouts
from unisono.errors import UnisonoError

__all__ = ["SharedGradients"]

_HOOKED = 6
"""A column of the runtime's words, after those of `shared_engine` and `engine_parts`."""


class SharedGradients(GradientAccumulation):
    """Sums the gradients of all ranks; has the calls of `Engine` from the first leaf of a step to `prepare`.

    A subclass begins the steps, with memory for their gradients, and updates the weights.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Sequence[nn.Module],
        runtime: SharedRuntime,
        comparison: SharedConsistencyCheck,
        *,
        virtual_ranks: int,
        overlap: bool,
    ) -> None:
        layouts = NodeLayouts(runtime.size, virtual_ranks=virtual_ranks)
        super().__init__(optimizer, modules, layouts, rank=runtime.rank, overlap=overlap)
        self._comparison, self._runtime = comparison, runtime
        self._optimizers = parts_of(optimizer)
        self._steps = 0
        self._hooked = False
        """True if a hook of the user runs before this step's update, on any rank."""
        self._arrived = self._released = self._prepared = False
        self._is_open = False
        self._factor = 1.0
        self._found_inf: Tensor | None = None
        self._used_by_all: list[bool] = []
        """For each parameter with dense gradients, True if it got one on any rank."""
        # A subclass sets all of these before the first step.
        self._is_whole: bool
        self._is_large: bool
        self._rows: GradientRows[Any]
        self._table: StepMetadata

    def flush(self) -> None:
        """Publish this rank's gradients and totals; see `Engine`."""
        if self._is_large:
            self._wait_for_release()
        self._rows.flush()
        for i, used in enumerate(self._used):
            self._table.write(i, self._totals[i].total(), used)
        if self._tables.exist:
            self._tables.post()

    def finish(self) -> Totals:
        """Wait for the gradients of all ranks; see `Engine`."""
        runtime, comparison, step = self._runtime, self._comparison, self._step
        step.writing = True  # the others may write once this rank has arrived
        runs_hooks = has_pre_hooks(self._optimizers)
        if runs_hooks or self._is_whole or has_post_hooks(self._optimizers):  # the update may then draw random numbers
            step.run_deferred()
        runtime.publish(_HOOKED, runs_hooks)
        comparison.begin(step)
        self._arrived = self._is_open = True
        what = f"waiting for the gradients of step {comparison.attempt} of this process"
        try:
            step.passed = passed = comparison.check(what, step)
        except UnisonoError:
            # Either a rank never reaches this barrier, so that no rank has passed it, or ranks differ, which all of
            # them find. No weight has been touched.
            self._arrived = False
            step.raise_interrupt()
            raise
        self._is_open = False
        self._steps += 1
        self._hooked = any(runtime.published(_HOOKED, passed))
        totals, self._used_by_all = self._table.total(self._layout, passed)
        if self._tables.exist:
            self._tables.collect(step)
        return totals

    def prepare(self, preparation: Preparation) -> float | None:
        """Record the factor; sum now if clipping, a scaler or hooks need the sum; see `Engine`."""
        factor, scaler, clip, change = preparation
        self._factor, self._found_inf = factor, None
        if self._tables.exist:
            self._tables.check_room()
            self._tables.scale(factor)  # each rank has its own copy of all of these
        if scaler is None and clip is None and change is None and not self._hooked:
            return None
        self._tables.complete(factor)
        sparse = self._tables.vectors()
        self._rows.reduce(self._used_by_all, factor)
        self._prepared = True
        runtime, table = self._runtime, self._table
        pieces, totals = self._own_totals()
        if scaler is not None:
            table.found_inf[runtime.rank] = unscale([*totals, *sparse], scaler)
        if change is not None:
            self._let_change(change)
            sparse = self._tables.vectors()
            pieces, totals = self._own_totals()
        if clip is not None:
            table.write_norms(self._rows.parts[runtime.rank], pieces, totals)
        runtime.barrier("waiting for the norm of the gradient", self._step)
        norm = None
        if scaler is not None:
            self._found_inf = table.found_inf.amax()
        if clip is not None:
            of_sparse = block_norms([block for vector in sparse for block in blocks_of(vector)])
            norm = global_norm([*table.norms.tolist(), *of_sparse.tolist()])
            scale = clip_factor(norm, clip)
            if scale < 1.0 and (totals or sparse):
                torch._foreach_mul_([*totals, *sparse], scale)
        if self._hooked:
            runtime.barrier("waiting for the whole gradient, which hooks may read", self._step)
            self._show_gradients()
        return norm

    def _own_totals(self) -> tuple[list[Piece], list[Tensor]]:
        """Return this rank's pieces of the parameters that got a gradient, and their sums."""
        own = zip(self._rows.parts[self._runtime.rank], self._rows.totals, strict=True)
        used = [(piece, total) for piece, total in own if self._used_by_all[piece.parameter]]
        return [piece for piece, _ in used], [total for _, total in used]

    def _let_change(self, change: Callable[[], None]) -> None:
        """Call a function that may change a copy of the whole gradient, and store this rank's part of the result."""
        runtime, step = self._runtime, self._step
        runtime.barrier("waiting for the whole gradient", step)
        given = self._rows.gradients
        for p, gradient, used in zip(self._trained.parameters, given, self._used_by_all, strict=True):
            p.grad = gradient.clone() if used else None
        runtime.barrier("waiting until all ranks have the gradient", step)
        change()
        self._used_by_all = [p.grad is not None for p in self._trained.parameters]
        for piece, total in zip(*self._own_totals(), strict=True):
            p = self._trained.parameters[piece.parameter]
            assert p.grad is not None
            total.view(-1).copy_(in_memory_order(p.grad, dense_strides(p))[piece.start : piece.stop])
        self._tables.take_changed()

    def _wait_for_release(self) -> None:
        """Wait until rows may be written: before that, other ranks may still read the last step's gradient there."""
        if not self._released:
            self._runtime.wait_for_release()
            self._released = True

    def _store_sum(self, index: int, left: Tensor | None, gradient: Tensor | None) -> None:
        """Pass the sum of one parameter to the rows."""
        if self._is_large:
            self._wait_for_release()
        last = len(self._sums) - 1
        if left is not None and gradient is not None:
            self._rows.put_sum(last, index, left, gradient)
        else:
            self._rows.put(last, index, gradient)

    def _store_leaf(self, gradients: Gradients) -> None:
        """Pass all gradients of the last node to the rows."""
        if self._is_large:
            self._wait_for_release()
        self._rows.put_all(len(self._sums) - 1, gradients)

    def _store_node(self, i: int) -> None:
        """Pass the sums of a node to the rows."""
        if self._is_large:
            self._wait_for_release()
        self._rows.put_all(i, self._sums[i].total())

    def _show_gradients(self) -> None:
        """Set each p.grad to the sum of all ranks, or to None if none of them got a gradient."""
        for p, gradient, used in zip(self._trained.parameters, self._rows.gradients, self._used_by_all, strict=True):
            p.grad = gradient if used else None
