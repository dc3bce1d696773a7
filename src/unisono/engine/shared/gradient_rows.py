"""The gradients of a step in shared memory, and their sum: the base class of all layouts.

Each rank updates a part of the parameters, and so sums that part of the gradient. Each part has rows, to which the
nodes of the tree are written. The sum of a part ends in the first row, which is thus the whole gradient once all ranks
have summed. The additions are those of the tree, on any rank; a + b and b + a have the same bits. The layouts differ in
their cost: small models have `BatchedRows`, large ones `DirectRows` on two ranks and `PairedRows` on more.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from unisono.engine.node_sums import Gradients
from unisono.engine.norm import dense_strides
from unisono.engine.shared.parameter_arena import ArenaLayout
from unisono.engine.shared.partition import Piece
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.tree_all_reduce import NodeLayout

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["GradientRows"]

_Plan = TypeVar("_Plan")


class GradientRows(ABC, Generic[_Plan]):
    """The rows of one engine, in a separate segment.

    The calls of a step are `start`, then `put`, `put_sum` or `put_all` for this rank's nodes, `flush`, and `reduce`
    once all ranks have flushed.

    Args:
        runtime: Allocates the segment. Every rank must build the rows.
        parameters: The parameters of the gradients.
        parts: The pieces of each rank.
        widest: The layout with all virtual ranks.
        spare: The number of further rows, for `turned`.
    """

    def __init__(
        self,
        runtime: SharedRuntime,
        parameters: Sequence[Tensor],
        parts: Sequence[Sequence[Piece]],
        *,
        widest: NodeLayout,
        spare: int = 0,
    ) -> None:
        self.rank, self.parts, self.widest = runtime.rank, parts, widest
        self.strides = [dense_strides(p) for p in parameters]
        """The strides of each parameter's gradient."""
        self._layout = ArenaLayout(parameters)
        self._segment = runtime.segment((self._count_rows() + spare) * self._layout.nbytes, "gradients")
        self._first = 0
        """The place of the first row."""
        self._attempt = 0
        self._own: list[Gradients] = []
        self._find_places()
        self._set_up(runtime, parameters)

    def _find_places(self) -> None:
        """Find the places in the rows, once the place of the first row is known."""
        base = self._first * self._layout.nbytes
        self.gradients = [self._layout.whole(self._segment, i, base=base) for i in range(len(self.strides))]
        """The summed gradient of each parameter, once all ranks have summed."""
        self.totals = [self.vector(0, *piece) for piece in self.parts[self.rank]]
        """The same for the pieces of this rank."""
        self._plans: dict[int, _Plan] = {}
        self._plan: _Plan

    def turned(self, number: int) -> Self:
        """Return these rows with another first row: spare row `number`, which counts from 0.

        So the sum of a step is still there in the next steps, if they begin with other rows.
        """
        turned = copy.copy(self)
        turned._first = self._count_rows() + number
        turned._find_places()
        return turned

    def prepare(self) -> None:
        """Make now what steps with all virtual ranks keep.

        Made within a step, it would lie among what the step allocates, and keep the memory between from being used as
        one: with eight rows that take turns, 45 MB more for a model of 1.2 million parameters.
        """
        self._plan_for(self.widest)

    def start(self, layout: NodeLayout, attempt: int) -> None:
        """Begin a step. Nothing is written yet.

        Args:
            layout: The nodes of each rank.
            attempt: The number of the step: equal on all ranks, and not used before.
        """
        self._plan, self._attempt = self._plan_for(layout), attempt
        self._own = [[None] * len(self.strides) for _ in layout.nodes[self.rank]]

    @abstractmethod
    def put(self, i: int, index: int, gradient: Tensor | None) -> None:
        """Add one parameter's gradient as that of this rank's node number i; None counts as zero."""

    def put_all(self, i: int, gradients: Gradients) -> None:
        """Add the gradients of all parameters as those of this rank's node number i."""
        for index, gradient in enumerate(gradients):
            self.put(i, index, gradient)

    def put_sum(self, i: int, index: int, left: Tensor, right: Tensor) -> None:
        """Add the sum of two gradients as `put` does; both are used up."""
        self.put(i, index, left.add_(right))

    def flush(self) -> None:
        """Write gradients for the other ranks that are not written yet."""

    @abstractmethod
    def reduce(self, used: Sequence[bool], factor: float) -> None:
        """Sum this rank's part over all nodes, and multiply it by a factor. The gradients of `put` are used up."""

    def forget(self) -> None:
        """Drop the references to the gradients of `put`."""
        self._own = []

    def is_whole(self, piece: Piece) -> bool:
        """Return True if a piece is all of its parameter."""
        return piece.stop - piece.start == self.gradients[piece.parameter].numel()

    def place(self, row: int, piece: Piece) -> Tensor:
        """Return a piece of a row as a tensor: a vector, or for a whole parameter one of its shape."""
        if self.is_whole(piece):
            return self._layout.whole(self._segment, piece.parameter, base=self._base(row))
        return self.vector(row, *piece)

    def vector(self, row: int, index: int, start: int, stop: int) -> Tensor:
        """Return a range of a parameter's elements in a row, as a vector in memory order."""
        return self._layout.vector(self._segment, index, start, stop, base=self._base(row))

    def _plan_for(self, layout: NodeLayout) -> _Plan:
        plan = self._plans.get(layout.leaves)
        if plan is None:
            plan = self._plans[layout.leaves] = self._make_plan(layout)
        return plan

    def _base(self, row: int) -> int:
        return (row or self._first) * self._layout.nbytes

    def _set_up(self, runtime: SharedRuntime, parameters: Sequence[Tensor]) -> None:
        """Make what a layout has besides its rows."""

    @abstractmethod
    def _count_rows(self) -> int:
        """Return how many rows a step may need at most."""

    @abstractmethod
    def _make_plan(self, layout: NodeLayout) -> _Plan:
        """Plan the writes and additions of this rank in a step with the given layout."""
