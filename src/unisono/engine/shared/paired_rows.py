"""Rows for the gradients of more than two ranks in half the memory: two nodes that the tree adds share a row.

Of the two ranks, the first to arrive with a piece of the gradient writes it, and the other adds to it; a + b and b + a
have the same bits. Each piece has a lock. One rank goes through the pieces from the front and the other from the back,
so they seldom want the same piece. No part of a gradient is kept elsewhere: this saves memory with more than two ranks,
whereas two ranks would only do more work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from unisono.engine.norm import in_memory_order
from unisono.engine.shared.addition_schedule import add_up
from unisono.engine.shared.gradient_rows import GradientRows
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.plan import fold
from unisono.shm.segment import Segment
from unisono.shm.semaphore import SEMAPHORE_NBYTES, Semaphore

__all__ = ["PairedRows"]

_PIECE = 262144
"""The number of elements under one lock: enough that the 2 µs of a lock do not matter."""
_STAMP_OFFSET = 48
"""The offset of the stamp in bytes: behind the semaphore, in its cache line."""


class _PairedPlan:
    """The row of each node in a step with a given number of leaves."""

    def __init__(self, layout: NodeLayout) -> None:
        owners = [(rank, i) for rank, nodes in enumerate(layout.nodes) for i in range(len(nodes))]
        nodes = [layout.nodes[rank][i] for rank, i in owners]
        partners: dict[int, int] = {}

        def pair(left: int, right: int) -> int:
            if left >= 0 and right >= 0:
                partners[left], partners[right] = right, left
            return -1

        fold({node: k for k, node in enumerate(nodes)}, leaves=layout.leaves, add=pair)
        self.rows: dict[tuple[int, int], int] = {}
        """The row of a rank's node, by rank and number of the node."""
        self.partners: dict[tuple[int, int], int] = {}
        """The rank with which a node shares its row, if there is one, by rank and number of the node."""
        count = 0
        for k, owner in enumerate(owners):
            partner = partners.get(k)
            if partner is not None:
                self.partners[owner] = owners[partner][0]
            if partner is not None and partner < k:
                self.rows[owner] = self.rows[owners[partner]]
            else:
                self.rows[owner], count = count, count + 1
        self.count = count
        """The number of rows."""
        self.additions: list[tuple[int, int]] = []
        """Pairs of rows to add, the second to the first. The sum ends in row 0."""
        rows = {node: self.rows[owner] for node, owner in zip(nodes, owners, strict=True)}
        fold(rows, leaves=layout.leaves, add=self._add)

    def _add(self, left: int, right: int) -> int:
        if left != right:  # otherwise the two ranks have added them
            self.additions.append((left, right))
        return left


class PairedRows(GradientRows[_PairedPlan]):
    """The rows of one engine; see `GradientRows`."""

    def _set_up(self, runtime: SharedRuntime, parameters: Sequence[Tensor]) -> None:
        self._bounds = [
            [(start, min(start + _PIECE, p.numel())) for start in range(0, p.numel(), _PIECE)] for p in parameters
        ]
        """For each parameter, its pieces, each under one lock."""
        self._firsts = [0]
        """The number of each parameter's first lock in a row, and at the end the number of locks in a row."""
        for bounds in self._bounds:
            self._firsts.append(self._firsts[-1] + len(bounds))
        self._locks = _Locks(runtime, self._count_rows() * self._firsts[-1])

    def _find_places(self) -> None:
        super()._find_places()
        self._places: dict[tuple[int, int], list[Tensor]] = {}
        """The places of the pieces in this rank's rows, by row and parameter."""

    def put(self, i: int, index: int, gradient: Tensor | None) -> None:
        """Write the gradient, or add it to the partner's; see `GradientRows`."""
        rank = self.rank
        row, partner = self._plan.rows[rank, i], self._plan.partners.get((rank, i))
        places = self._places[row, index]
        sources: Sequence[Tensor | None] = [None] * len(places)
        if gradient is not None and places:
            sources = torch.split(in_memory_order(gradient, self.strides[index]), _PIECE)
        if partner is None:
            for place, source in zip(places, sources, strict=True):
                _write(place, source)
            return
        first_lock = row * self._firsts[-1] + self._firsts[index]
        pieces = range(len(places))
        for k in pieces if rank < partner else reversed(pieces):
            with self._locks.hold(first_lock + k, partner):
                if self._locks.comes_first(first_lock + k, self._attempt):
                    _write(places[k], sources[k])
                else:
                    _add(places[k], sources[k])

    def reduce(self, used: Sequence[bool], factor: float) -> None:
        """Sum the rows, which are fewer than the nodes; see `GradientRows`."""
        parts = self.parts[self.rank]
        chosen = [k for k, piece in enumerate(parts) if used[piece.parameter]]
        if not chosen:
            return
        plan = self._plan
        vectors = {0: [self.totals[k] for k in chosen]}
        for row in {row for addition in plan.additions for row in addition} - {0}:
            vectors[row] = [self.vector(row, *parts[k]) for k in chosen]
        add_up(vectors, plan.additions, total=0, factor=factor)

    def _count_rows(self) -> int:
        # A step with fewer leaves has no more nodes, but other pairs. Pages that are not written take no memory.
        return sum(map(len, self.widest.nodes))

    def _make_plan(self, layout: NodeLayout) -> _PairedPlan:
        plan = _PairedPlan(layout)
        for i in range(len(layout.nodes[self.rank])):
            row = plan.rows[self.rank, i]
            for index, bounds in enumerate(self._bounds):
                if (row, index) not in self._places:
                    self._places[row, index] = [self.vector(row, index, start, stop) for start, stop in bounds]
        return plan


class _Locks:
    """A lock for each piece of each row, and the step in which that piece was last written."""

    def __init__(self, runtime: SharedRuntime, count: int) -> None:
        def prepare(segment: Segment) -> None:
            for k in range(count):
                semaphore = Semaphore(segment.address + k * SEMAPHORE_NBYTES)
                semaphore.create()
                semaphore.post()

        self._runtime = runtime
        self._segment = runtime.segment(count * SEMAPHORE_NBYTES, "locks", prepare=prepare)
        self._semaphores = [Semaphore(self._segment.address + k * SEMAPHORE_NBYTES) for k in range(count)]
        self._words = memoryview(self._segment.memory)[: count * SEMAPHORE_NBYTES].cast("q")

    @contextmanager
    def hold(self, k: int, other: int) -> Iterator[None]:
        """Hold a lock that one other rank may want.

        Raises:
            PeerError: If the other rank does not release it in time or has died, or if a rank has aborted.
        """
        if not self._semaphores[k].try_wait():
            self._runtime.wait_for_semaphore(self._semaphores[k], other, "waiting for a piece of the gradient")
        try:
            yield
        finally:
            self._semaphores[k].post()

    def comes_first(self, k: int, attempt: int) -> bool:
        """Return True if no rank has written a piece in this step, and record the write. The caller holds the lock."""
        word = (k * SEMAPHORE_NBYTES + _STAMP_OFFSET) // 8
        if self._words[word] == attempt:
            return False
        self._words[word] = attempt
        return True


def _write(place: Tensor, source: Tensor | None) -> None:
    if source is None:
        place.zero_()
    else:
        place.copy_(source)


def _add(place: Tensor, source: Tensor | None) -> None:
    if source is None:
        place.add_(0.0)  # -0.0 becomes 0.0, as when a zero is added
    else:
        place.add_(source)
