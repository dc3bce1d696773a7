"""The gradients of a step in shared memory, and their sum: what all ways to lay them out have in common.

Each rank updates a part of the parameters, and so sums that part of the gradient. For each part there are rows, which
the nodes of the tree are written to. The sum of a part ends in the first row, which is thus the whole gradient once all
ranks have summed. Additions are those of the tree, whoever does them; a + b and b + a have the same bits. What differs
is what costs: small models have `BatchedRows`, large ones `DirectRows` on two ranks and `PairedRows` on more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from unisono.engine.node_sums import Gradients
from unisono.engine.norm import dense_strides
from unisono.engine.shared.parameter_arena import TensorLayout
from unisono.engine.shared.partition import Shard
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.tree_all_reduce import NodeLayout

__all__ = ["GradientRows"]

_Plan = TypeVar("_Plan")


class GradientRows(ABC, Generic[_Plan]):
    """The rows of one engine, which lie in a segment of their own.

    The calls of a step are `start`, then `put`, `put_sum` or `put_all` for this rank's nodes, `flush`, and `reduce`
    once all ranks have flushed.

    Args:
        runtime: Makes the segment. Every rank must build the rows.
        parameters: What the gradients are of.
        parts: The pieces of each rank.
        widest: The layout with all virtual ranks.
    """

    def __init__(
        self,
        runtime: SharedRuntime,
        parameters: Sequence[Tensor],
        parts: Sequence[Sequence[Shard]],
        *,
        widest: NodeLayout,
    ) -> None:
        self.rank, self.parts, self.widest = runtime.rank, parts, widest
        self.strides = [dense_strides(p) for p in parameters]
        """Of each parameter, and of its gradient."""
        self._layout = TensorLayout(parameters)
        self._segment = runtime.segment(self._count_rows() * self._layout.nbytes, "gradients")
        self.gradients = [self._layout.whole(self._segment, i) for i in range(len(parameters))]
        """The summed gradient of each parameter, once all ranks have summed."""
        self.totals = [self.vector(0, *piece) for piece in parts[self.rank]]
        """The same for the pieces of this rank."""
        self._plans: dict[int, _Plan] = {}
        self._plan: _Plan
        self._attempt = 0
        self._own: list[Gradients] = []

    def start(self, layout: NodeLayout, attempt: int) -> None:
        """Begin a step. Nothing is written yet.

        Args:
            layout: Which rank has which nodes.
            attempt: Number of the step: the same on all ranks, and new.
        """
        plan = self._plans.get(layout.leaves)
        if plan is None:
            plan = self._plans[layout.leaves] = self._make_plan(layout)
        self._plan, self._attempt = plan, attempt
        self._own = [[None] * len(self.strides) for _ in layout.nodes[self.rank]]

    @abstractmethod
    def put(self, i: int, index: int, gradient: Tensor | None) -> None:
        """Take one parameter's gradient for this rank's node number i; None counts as zero."""

    def put_all(self, i: int, gradients: Gradients) -> None:
        """Take the gradients of all parameters for this rank's node number i."""
        for index, gradient in enumerate(gradients):
            self.put(i, index, gradient)

    def put_sum(self, i: int, index: int, left: Tensor, right: Tensor) -> None:
        """Take the sum of two gradients, both of which are used up."""
        self.put(i, index, left.add_(right))

    def flush(self) -> None:
        """Write for the others what was taken and is not written yet."""

    @abstractmethod
    def reduce(self, used: Sequence[bool], factor: float) -> None:
        """Sum this rank's part over all nodes, and multiply it by a factor; the gradients given are used up."""

    def forget(self) -> None:
        """Let go of the gradients that were given."""
        self._own = []

    def is_whole(self, piece: Shard) -> bool:
        """True if a piece is all of its parameter."""
        return piece.stop - piece.start == self.gradients[piece.parameter].numel()

    def place(self, row: int, piece: Shard) -> Tensor:
        """Show a piece of a row; a whole parameter as what it is."""
        if self.is_whole(piece):
            return self._layout.whole(self._segment, piece.parameter, base=row * self._layout.nbytes)
        return self.vector(row, *piece)

    def vector(self, row: int, index: int, start: int, stop: int) -> Tensor:
        """Show some elements of a row, in the order of memory."""
        return self._layout.vector(self._segment, index, start, stop, base=row * self._layout.nbytes)

    @abstractmethod
    def _count_rows(self) -> int:
        """Return how many rows any step may need."""

    @abstractmethod
    def _make_plan(self, layout: NodeLayout) -> _Plan:
        """Work out what this rank writes and sums in a step of some leaves."""
