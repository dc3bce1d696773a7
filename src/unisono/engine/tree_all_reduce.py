"""All-reduce of one vector, summed over the ranks in the order of the plan's tree.

Each rank holds a row for each of the largest nodes of the tree that lie within its block of leaves. The rest of the
tree is finished in one of two ways, with the same bits. *Direct*: every rank sends its rows to all others and sums all
rows; one phase, best for short vectors and used for two ranks. *Segmented*: rank j gets segment j of all rows, sums it,
and sends the result to all; two phases, with the traffic of a ring all-reduce, 2(W-1)/W of the vector each way (if
every rank has one row). The backend's own all-reduce does not specify its order of additions. It serves only two ranks
with one row each, since a + b has one order only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import Wait
from unisono.collectives.world import World
from unisono.engine.early_receives import EarlyReceives
from unisono.engine.step_transaction import StepTransaction
from unisono.plan import Node, fold, nodes_of, rank_block
from unisono.plan.alignment import BUFFER_NUMEL, align_up

__all__ = ["DIRECT_NBYTES", "AllReduce", "MakeAllReduce", "NodeLayout", "NodeLayouts", "TreeAllReduce", "additions"]

DIRECT_NBYTES = 64 * 1024
"""Up to this size latency decides, and a second phase costs more than sending everything to everyone."""
_PAIR_NBYTES = 512 * 1024
"""The same for two ranks on two hosts, which send no more in one phase than in two."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The nodes that each rank holds in a step with a given number of leaves."""

    nodes: tuple[tuple[Node, ...], ...]
    """The nodes of each rank, in order."""
    leaves: int
    """The number of leaves of the step."""

    @classmethod
    def of(cls, *, leaves: int, world_size: int, virtual_ranks: int, in_turn: bool = False) -> NodeLayout:
        """Return the layout of a step; see `rank_block`. Pure."""
        deal = partial(rank_block, world_size=world_size, virtual_ranks=virtual_ranks, in_turn=in_turn)
        blocks = map(deal, range(world_size))
        return cls(tuple(tuple(nodes_of(block, leaves=leaves)) for block in blocks), leaves)


class NodeLayouts:
    """The layouts of a run's steps, each computed once for its number of leaves."""

    def __init__(self, world_size: int, *, virtual_ranks: int, in_turn: bool = False) -> None:
        self._make = partial(NodeLayout.of, world_size=world_size, virtual_ranks=virtual_ranks, in_turn=in_turn)
        self._by_leaves: dict[int, NodeLayout] = {}
        self.widest = self.of(virtual_ranks)
        """The layout with all virtual ranks, in which every rank has the most nodes."""

    def of(self, leaves: int) -> NodeLayout:
        """Return the layout of a step."""
        layout = self._by_leaves.get(leaves)
        if layout is None:
            layout = self._by_leaves[leaves] = self._make(leaves=leaves)
        return layout


class AllReduce(Protocol):
    """An all-reduce of one vector: `start`, fill the rows, `launch`, `advance`, `finish`."""

    @property
    def rows(self) -> Sequence[Tensor]:
        """This rank's rows, one for each of its nodes."""

    def start(self, layout: NodeLayout) -> None:
        """Begin a step. The rows may be written after this call."""

    def launch(self) -> None:
        """Publish this rank's rows to the others. The rows must not be touched until `finish`."""

    def advance(self) -> None:
        """Perform all the work that precedes the wait for the result."""

    def finish(self, step: StepTransaction) -> Tensor:
        """Wait for the sum, and return it."""


class MakeAllReduce(Protocol):
    """Makes the all-reduce of a vector. Every rank must call it."""

    def __call__(self, numel: int, *, widest: NodeLayout, dtype: torch.dtype, device: torch.device) -> AllReduce:
        """Allocate the rows."""


class TreeAllReduce:
    """An all-reduce through the process group; see `AllReduce`. Its buffers are kept between steps."""

    phases = 2
    """How often data is sent at most: in `launch`, and in `advance`, to be called once."""

    def __init__(
        self,
        world: World,
        numel: int,
        *,
        widest: NodeLayout,
        dtype: torch.dtype,
        device: torch.device,
        early: EarlyReceives | None = None,
    ) -> None:
        """Allocate the rows. `widest` is the layout with all virtual ranks, which has the most nodes on every rank.

        `early` lets short vectors be received early; it is for CPU ranks of several hosts.
        """
        assert world.group is not None
        self._group, self._rank, self._size = world.group, world.rank, world.size
        self._waiter = world.waiter
        self._seen: list[Wait | None] = [None if r == world.rank else world.wait_for(r) for r in range(world.size)]
        # torch's batch of sends and receives costs 50 µs more than posting them singly, and only nccl needs it.
        self._batched = world.device.type != "cpu"
        self.numel = align_up(max(numel, 1), BUFFER_NUMEL * world.size)
        """The length of the vector, padded so that it divides into aligned segments."""
        nbytes = self.numel * dtype.itemsize
        self._direct = world.size == 2 or nbytes <= DIRECT_NBYTES
        is_short = nbytes <= (_PAIR_NBYTES if world.size == 2 else DIRECT_NBYTES)
        self._early = early if is_short and not self._batched else None
        self._came: list[tuple[Tensor, Tensor]] = []
        """The memory of early receives, and the rows that they are for."""
        self._by_backend = world.size == 2 and self._early is None
        self._counts = [len(nodes) for nodes in widest.nodes]
        self.rows = torch.zeros(self._counts[world.rank], self.numel, dtype=dtype, device=device).unbind()
        """This rank's rows, each of shape [numel]; unused padding stays zero."""
        self._peer_rows: list[tuple[Tensor, ...]] = []
        self._segments = [self.rows[0][self._segment(r)] for r in range(world.size)]
        self._plans: dict[int, _ReducePlan] = {}
        self._plan = self._plan_for(widest)
        self._works: list[tuple[Wait | None, dist.Work]] = []

    def start(self, layout: NodeLayout) -> None:
        """Begin a step. The rows may be written after this call."""
        plan = self._plans.get(layout.leaves)
        self._plan = plan if plan is not None else self._plan_for(layout)
        self._works = []
        if self._early is not None:
            for peer in self._peers():
                self._early.expect(peer, self._row_nbytes, len(layout.nodes[peer]))

    def launch(self) -> None:
        """Send this rank's rows; see `AllReduce`. Every rank must launch its all-reduces in the same order."""
        if self._plan.by_backend:
            self._works = [(self._seen[1 - self._rank], self._group.allreduce([self.rows[0]]))]
        else:
            self._transfer(self._plan.sends, self._plan.receives)

    def advance(self) -> None:
        """Sum this rank's segment and send it to all. A direct all-reduce does nothing here."""
        if self._direct:
            return
        self._wait()
        mine = self._segments[self._rank]
        total = self._plan.add_up()
        if total.data_ptr() != mine.data_ptr():
            mine.copy_(total)
        peers = self._peers()
        self._transfer([(peer, mine) for peer in peers], [(peer, self._segments[peer]) for peer in peers])

    @property
    def total(self) -> Tensor:
        """The buffer, of shape [numel], that holds the sum of this step after `finish` and until the next `start`."""
        return self._plan.total if self._direct else self.rows[0]

    def finish(self, step: StepTransaction) -> Tensor:
        """Wait for the sum, and return it."""
        self._wait()
        if self._direct:
            self._plan.add_up()
        return self.total

    def _plan_for(self, layout: NodeLayout) -> _ReducePlan:
        # The backend's all-reduce adds half of the vector on each rank, where a direct one adds all of it on both: 25M
        # parameters train 1.2 times as fast. But it sends twice in turn, which counts between hosts.
        if self._by_backend and all(len(nodes) == 1 for nodes in layout.nodes):
            plan = self._plans[layout.leaves] = _ReducePlan([], [], [], self.rows[0], by_backend=True)
            return plan
        self._allocate_peer_rows()
        own = self.rows[: len(layout.nodes[self._rank])]
        kept = slice(None) if self._direct else self._segment(self._rank)
        sends: list[_Transfer] = []
        receives: list[_Transfer] = []
        values: dict[Node, Tensor] = {}
        for peer in self._peers():
            sent = slice(None) if self._direct else self._segment(peer)
            sends += [(peer, row[sent]) for row in own]
            receives += [(peer, row) for row in self._peer_rows[peer][: len(layout.nodes[peer])]]
        for rank, nodes in enumerate(layout.nodes):
            rows = [row[kept] for row in own] if rank == self._rank else self._peer_rows[rank][: len(nodes)]
            values.update(zip(nodes, rows, strict=True))
        plan = self._plans[layout.leaves] = _ReducePlan(sends, receives, *additions(values, leaves=layout.leaves))
        return plan

    def _allocate_peer_rows(self) -> None:
        if self._peer_rows:
            return
        width = self.numel if self._direct else self.numel // self._size
        self._peer_rows = [
            () if rank == self._rank else self.rows[0].new_empty(count, width).unbind()
            for rank, count in enumerate(self._counts)
        ]

    @property
    def _row_nbytes(self) -> int:
        return self.numel * self.rows[0].itemsize

    def _peers(self) -> list[int]:
        # Each rank begins with its right neighbour, so that not everyone talks to rank 0 first.
        return [(self._rank + i) % self._size for i in range(1, self._size)]

    def _segment(self, rank: int) -> slice:
        width = self.numel // self._size
        return slice(rank * width, (rank + 1) * width)

    def _transfer(self, sends: Sequence[_Transfer], receives: Sequence[_Transfer]) -> None:
        if self._batched:
            operations = [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=r) for r, tensor in receives]
            operations += [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=r) for r, tensor in sends]
            if operations:
                self._works += [(None, work) for work in dist.batch_isend_irecv(operations)]
            return
        if self._early is not None:
            for peer, tensor in receives:
                seen, work, memory = self._early.take(peer, self._row_nbytes)
                self._works.append((seen, work))
                self._came.append((memory, tensor))
            self._works += [self._early.send(peer, tensor) for peer, tensor in sends]
            return
        for peer, tensor in receives:
            self._works.append((self._seen[peer], self._group.recv([tensor], peer, 0)))
        for peer, tensor in sends:
            self._works.append((self._seen[peer], self._group.send([tensor], peer, 0)))

    def _wait(self) -> None:
        for seen, work in self._works:
            self._waiter.wait(work, seen)
        self._works = []
        if self._early is not None:
            for memory, row in self._came:
                row.copy_(memory.view(row.dtype))
                self._early.give_back(memory)
            self._came = []


_Transfer = tuple[int, Tensor]


@dataclass(frozen=True, slots=True)
class _ReducePlan:
    """The transfers and additions of a step with a given number of leaves, computed once."""

    sends: list[_Transfer]
    receives: list[_Transfer]
    additions: list[tuple[Tensor, Tensor]]
    """The additions, in place on the left, once everything has been received."""
    total: Tensor
    """The tensor that holds the sum afterwards."""
    by_backend: bool = False
    """True if the backend's all-reduce does everything."""

    def add_up(self) -> Tensor:
        for left, right in self.additions:
            left.add_(right)
        return self.total


def additions(values: Mapping[Node, Tensor], *, leaves: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return the additions, in place on the left, that finish the tree, and the tensor that holds the result."""
    additions: list[tuple[Tensor, Tensor]] = []

    def note(left: Tensor, right: Tensor) -> Tensor:
        additions.append((left, right))
        return left

    total = fold(values, leaves=leaves, add=note)
    return additions, total
