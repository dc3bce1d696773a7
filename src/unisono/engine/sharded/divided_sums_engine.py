"""An engine whose ranks keep no sums of their earlier leaves: these lie in parts on all ranks, as everything else.

Leaves are dealt to ranks in turn: those that W ranks compute at the same time, one *turn*, are neighbours in the plan's
tree, so each rank can add its part of them as soon as they come. The order is that in which one process adds all leaves
(`NodeSum`), so a rank keeps at most log2(leaves) + 1 sums of its own part: one of them has the memory in which the
whole sum is needed anyway. The price is traffic: gradients are sent after each leaf.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.base import Trained, refuse_sparse
from unisono.engine.node_sums import NodeSum
from unisono.engine.sharded.division import Division
from unisono.engine.sharded.exchange import add_runs
from unisono.engine.sharded.sharded_engine import ShardedEngine
from unisono.engine.step_transaction import StepTransaction
from unisono.plan import Node

__all__ = ["DividedSumsEngine"]


class DividedSumsEngine(ShardedEngine):
    """Sums gradients into the parts of ranks, after each turn of leaves; see `ShardedEngine`.

    Memory: while a rank computes a leaf, its whole gradients of units that are not complete on all ranks (with
    micro-batches, or without overlap: of all), and log2(leaves) + 1 times its part at most, of a W-th of the model.
    Traffic: (W - 1)/W of the model for each leaf of a rank.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        modules: Sequence[nn.Module],
        world: World,
        division: Division,
        *,
        virtual_ranks: int,
        overlap: bool,
    ) -> None:
        super().__init__(
            optimizer, modules, world, division, virtual_ranks=virtual_ranks, overlap=overlap, in_turn=True
        )
        self._parts: list[NodeSum[list[Tensor]]] = []
        """For each unit, the sums of this rank's part over the leaves of all ranks so far."""

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step; see `Engine`."""
        super().start(step, trained, leaves=leaves)
        self._parts = [NodeSum(Node(0, leaves), add=add_runs) for _ in self._members]
        self._begin_leaf()

    def close_leaf(self, leaf: int) -> None:
        """Take the gradients of one leaf, and wait until all ranks have summed those of this turn; see `Engine`."""
        self._streaming = False
        for index, p in enumerate(self._trained.parameters):
            if not self._settled[index]:
                gradient, p.grad = p.grad, None
                self._add_last_leaf(index, gradient)
        if leaf + self._world.size < self._layout.leaves:
            self._division.exchange.meet()
            self._begin_leaf()

    def close(self) -> None:
        """Release the parameters; see `Engine`."""
        super().close()
        self._parts = []

    def abort(self, *, alike: bool) -> bool:
        """Discard the step; see `Engine`."""
        self._parts = []
        return super().abort(alike=alike)

    def _begin_leaf(self) -> None:
        self._settled = [False] * len(self._trained.parameters)
        self._missing = [len(members) for members in self._members]
        self._rows = [[{}] for _ in self._members]

    def _is_streamed(self, leaf: int) -> bool:
        return True  # each leaf is the last one whose gradients are kept on this rank

    def _add_last_leaf(self, index: int, gradient: Tensor | None) -> None:
        """Keep a leaf's gradient of one parameter until those of its unit are complete on all ranks."""
        refuse_sparse([self._trained.names[index]], [gradient])
        self._used[self._node][index] |= gradient is not None
        self._settled[index] = True
        self._store_sum(index, None, gradient)

    def _reduce(self, number: int) -> None:
        """Add the gradients of a unit that ranks have computed in this turn."""
        members, unit = self._members[number], self._division.units[number]
        if not members:
            return
        exchange, layouts, out = self._division.exchange, self._layouts_of[number], self._totals_of[number]
        first = exchange.turn * self._world.size
        leaves = range(first, min(first + self._world.size, self._layout.leaves))
        row = self._rows[number][0] if self._rank < len(leaves) else None
        parts = exchange.give_parts(unit, layouts, row, givers=len(leaves))
        parts.reverse()
        for leaf in leaves:
            part = parts.pop()
            if not leaf:  # what follows is added to it in place, so the whole sum is there at the end
                out.copy_(part)
                part = out
            self._parts[number].push(leaf, layouts[self._rank].runs(part.to(out.device)))
