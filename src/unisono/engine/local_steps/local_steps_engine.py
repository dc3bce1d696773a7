"""The engine of steps whose gradients stay with the worker that computed them; see `Engine` for the calls of a step.

Each worker adds the gradients of its own virtual ranks, divides by its own weight, and updates its own weights. Ranks
exchange the totals of a step, six numbers, since a step happens on all ranks or on none. After the last step of a round
they add up what the workers have changed, in the order of a tree over the workers, and each applies the outer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.base import Preparation, Trained
from unisono.engine.consistency import BROKEN, ConsistencyCheck
from unisono.engine.gradient_sum import GradientSum
from unisono.engine.local_steps.workers import Workers
from unisono.engine.node_sums import Gradients, NodeSum, drop, take
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.totals import COUNT, NOTHING, Totals, Wants, add_rows, as_tensor, numbers_of, row_of, totals_of
from unisono.engine.tree_all_reduce import MakeAllReduce, NodeLayout, NodeLayouts
from unisono.engine.update import prepare_whole
from unisono.errors import UnisonoError
from unisono.plan import Node
from unisono.plan.bucketing import Item, group_by_size

__all__ = ["LocalStepsEngine"]

_BUCKET_NBYTES = 32 * 1024 * 1024


class LocalStepsEngine:
    """Updates each worker by its own gradients, and brings their weights together at the end of a round."""

    divides_update = copies_weights = sends_early = False

    def __init__(
        self,
        workers: Workers,
        world: World,
        comparison: ConsistencyCheck,
        make_all_reduce: MakeAllReduce,
        *,
        virtual_ranks: int,
        overlap: bool,
    ) -> None:
        self._workers, self._world, self._comparison = workers, world, comparison
        self._make_all_reduce, self._overlap = make_all_reduce, overlap
        self._layouts = NodeLayouts(world.size, virtual_ranks=virtual_ranks)
        self._over_workers = NodeLayout.of(leaves=workers.count, world_size=world.size, virtual_ranks=workers.count)
        self._given = Trained((), ())
        self._step, self._layout = StepTransaction(), self._layouts.widest
        self._rows: list[NodeSum[Any]] = []
        self._sums: dict[int, GradientSum] = {}
        self._weights: dict[int, float] = {}
        """By worker, the weight of its losses in this step."""
        self._gradients: dict[int, Gradients] = {}
        self._factor = 1.0
        self._lent = ExitStack()
        self._last = -1
        self._sent = self._broken = False
        self._totals: Any = None

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step; see `Engine`."""
        if self._broken:
            raise UnisonoError(BROKEN)
        workers = self._workers
        if trained is not self._given:
            if {id(p) for p in trained.parameters} != {id(p) for p in workers.parameters}:
                raise ValueError(
                    f"the step trains {len(trained.parameters)} parameters, and the workers of sync= have "
                    f"{len(workers.parameters)}, those that required a gradient when the Trainer was made: freeze "
                    "parameters before that, or leave sync= out"
                )
            self._given = trained
        self._step, self._layout = step, self._layouts.of(leaves)
        nodes = self._layout.nodes[self._world.rank]
        self._rows = [NodeSum(node, add=add_rows) for node in nodes]
        self._last = nodes[-1].stop - 1 if nodes else -1
        self._sums, self._weights, self._gradients = {}, {}, {}
        for worker in workers.own:
            first = worker * workers.leaves
            if (count := min(workers.leaves, leaves - first)) > 0:
                self._sums[worker] = GradientSum(Node(0, count), resumes=self._overlap)
                self._weights[worker] = 0.0
        self._sent = False
        drop(workers.parameters)
        workers.begin_step()
        self._lent.enter_context(workers.lent())
        if self._sums:
            workers.lend(min(self._sums))

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
        row = row_of(loss, weight, new_buffers=new_buffers, has_values=has_values, wants=wants)
        next(each for each in self._rows if leaf < each.node.stop).push(leaf, row)
        worker, place = divmod(leaf, self._workers.leaves)
        self._weights[worker] += weight
        self._sums[worker].resume(place, self._workers.parameters)
        if leaf == self._last:
            self._comparison.begin()

    def close_leaf(self, leaf: int) -> None:
        """Add the gradients of a leaf to its worker's, and let the parameters be the next worker's; see `Engine`."""
        worker, place = divmod(leaf, self._workers.leaves)
        self._sums[worker].close_leaf(place, self._given.names, self._workers.parameters)
        if place == self._sums[worker].node.stop - 1 and worker + 1 in self._sums:
            self._workers.lend(worker + 1)

    def flush(self) -> None:
        """Send the totals of this rank's leaves; see `Engine`."""
        if self._last < 0:
            self._comparison.begin()
        self._comparison.check()
        if self._world.group is None:
            return
        if self._totals is None:
            self._totals = self._make_all_reduce(
                COUNT, widest=self._layouts.widest, dtype=torch.float32, device=self._world.device
            )
        self._totals.start(self._layout)
        for row, total in zip(self._totals.rows, self._rows, strict=False):
            row[:COUNT] = as_tensor(total.total())
        self._totals.launch()
        self._sent = True

    def finish(self) -> Totals:
        """Wait for the totals of all ranks; see `Engine`. Gradients stay where they are."""
        self._lent.close()
        self._step.run_deferred()
        if self._world.group is None:
            (own,) = self._rows
            totals = totals_of(numbers_of(own.total()))
        else:
            self._totals.advance()
            totals = totals_of(self._totals.finish(self._step)[:COUNT].tolist())
        self._sent = False
        self._factor = totals.weight
        return totals

    def prepare(self, preparation: Preparation) -> float | None:
        """Divide each worker's gradient by its own weight, and clip it by its own norm; see `Engine`.

        Returns:
            The largest norm of a worker's gradient before clipping; None without a bound.
        """
        norms: list[float] = []
        whole = preparation.factor * self._factor
        for worker, total in self._sums.items():
            if not self._weights[worker]:
                continue  # no sample of this worker counts
            self._put_gradients(total.total())
            own = Preparation(whole / self._weights[worker], None, preparation.clip, None)
            norm = prepare_whole(self._workers.parameters, self._workers.optimizer, own)
            if norm is not None:
                norms.append(norm)
            self._gradients[worker] = take(self._workers.parameters)
        if preparation.clip is None:
            return None
        return _largest([norm for of_rank in self._world.gather(norms, "trainer.step") for norm in of_rank])

    def update(self, scaler: torch.amp.GradScaler | None) -> None:
        """Let each worker update its weights; at the end of a round, update the outer weights; see `Engine`."""
        workers = self._workers
        with workers.lent():
            for worker, gradients in self._gradients.items():
                workers.lend(worker)
                self._put_gradients(gradients)
                workers.update(worker)
            drop(workers.parameters)
        self._sums, self._gradients = {}, {}
        workers.position += 1
        if workers.position == workers.sync.every:
            self._bring_together()
            workers.begin_round()
        workers.end_step()

    def close(self) -> None:
        """Release the parameters; see `Engine`."""
        self._lent.close()
        self._given = Trained((), ())

    def abort(self, *, alike: bool) -> bool:
        """Discard the step; see `Engine`. Totals that have been sent cannot be recalled: no step can follow then."""
        self._lent.close()
        self._sums, self._gradients = {}, {}
        self._broken = self._broken or self._sent or self._comparison.is_open
        if self._broken:
            self._comparison.break_off()
        drop(self._workers.parameters)
        return True

    def _put_gradients(self, gradients: Gradients) -> None:
        for p, gradient in zip(self._workers.parameters, gradients, strict=True):
            p.grad = gradient

    def _bring_together(self) -> None:
        """Apply the mean of what the workers have changed. Traffic: the weights once, as for one gradient."""
        parameters = self._workers.parameters
        dtypes = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
        items = (Item(4 * p.numel(), p.device, dtype) for p, dtype in zip(parameters, dtypes, strict=True))
        for members in group_by_size(items, limit_nbytes=_BUCKET_NBYTES, exceed=True):
            total = self._sum(members, dtypes[members[0]]).div_(self._workers.count)
            start = 0
            for index in members:
                p = parameters[index]
                p.grad = total[start : start + p.numel()].view(p.shape).to(p.dtype)
                start += p.numel()
        self._workers.outer.step()
        drop(parameters)

    def _sum(self, members: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the sum over all workers of their differences in some parameters, as one vector."""
        workers, rank, device = self._workers, self._world.rank, self._workers.parameters[members[0]].device
        sums = []
        for node in self._over_workers.nodes[rank]:
            total = NodeSum(node, add=_add_vectors)
            for worker in range(node.start, node.stop):
                total.push(worker, torch.cat([workers.difference(worker, index).reshape(-1) for index in members]))
            sums.append(total.total())
        if self._world.group is None:
            (only,) = sums
            return only
        # Made anew for each round: rounds are rare, and the buffers are as large as the model.
        reduce = self._make_all_reduce(sums[0].numel(), widest=self._over_workers, dtype=dtype, device=device)
        reduce.start(self._over_workers)
        for row, vector in zip(reduce.rows, sums, strict=True):
            row[: vector.numel()] = vector
        reduce.launch()
        reduce.advance()
        return reduce.finish(self._step)[: sums[0].numel()].clone()


def _largest(norms: Sequence[float]) -> float:
    """Return the largest norm; NaN if one is NaN, which max() would not always find."""
    return next((norm for norm in norms if math.isnan(norm)), max(norms, default=0.0))


def _add_vectors(left: Tensor, right: Tensor) -> Tensor:
    return left.add_(right)
