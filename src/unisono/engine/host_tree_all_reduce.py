"""All-reduce of one vector between hosts: ranks of a host add up first, so each host sends a sum once and not per rank.

Let there be H hosts with L ranks each. Rank j of every host takes segment j of the vector:
1. within a host, each rank sends segment j of its rows to local rank j, which adds them up to the tree's nodes of the
   host;
2. between hosts, the ranks j send part h of these sums to the rank j of host h, which finishes the tree there,
3. and sends the result to the other ranks j;
4. within a host, each rank sends its finished segment to the others.
The additions are those of the tree, so the bits are those of `TreeAllReduce`. If the leaves of a host are one node, as
with a power of two of leaves for each host, it sends 2(H-1)/H of the vector, as in a ring all-reduce over hosts. With m
nodes it is (m+1)(H-1)/H. Start reading at `HostTreeAllReduce.advance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tree_all_reduce import DIRECT_NBYTES, NodeLayout, TreeAllReduce, additions
from unisono.plan import Node, nodes_of, rank_block
from unisono.plan.alignment import BUFFER_NUMEL, align_up

__all__ = ["HostGrid", "HostTreeAllReduce", "group_all_reduce"]


@dataclass(frozen=True, slots=True)
class HostGrid:
    """Several hosts with the same number of ranks, more than one each, that follow each other."""

    hosts: int
    """The number of hosts."""
    per_host: int
    """The number of ranks of each."""

    @classmethod
    def of(cls, names: Sequence[str]) -> HostGrid | None:
        """Return the grid of ranks whose hosts have these names; None if they do not form one. Pure.

        >>> HostGrid.of(["a", "a", "b", "b"])
        HostGrid(hosts=2, per_host=2)
        >>> HostGrid.of(["a", "b", "a", "b"]), HostGrid.of(["a", "a", "b"]), HostGrid.of(["a", "b"])
        (None, None, None)
        """
        hosts = list(dict.fromkeys(names))
        per_host = len(names) // len(hosts)
        if len(hosts) < 2 or per_host < 2 or [host for host in hosts for _ in range(per_host)] != list(names):
            return None
        return cls(len(hosts), per_host)


def group_all_reduce(
    world: World,
    grid: HostGrid | None,
    numel: int,
    *,
    widest: NodeLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> TreeAllReduce | HostTreeAllReduce:
    """Make the all-reduce of a vector through the process group. Every rank must call it.

    Args:
        grid: The hosts of the ranks; None if they do not form a grid, or there is one host.
    """
    if grid is None or device.type != "cpu" or numel * dtype.itemsize <= DIRECT_NBYTES:
        return TreeAllReduce(world, numel, widest=widest, dtype=dtype, device=device)
    return HostTreeAllReduce(world, grid, numel, widest=widest, dtype=dtype)


class HostTreeAllReduce:
    """An all-reduce of CPU ranks of several hosts; see `AllReduce`. Its buffers are kept between steps.

    Args:
        numel: The length of the vector.
        widest: The layout with all virtual ranks, which has the most nodes on every rank.
    """

    phases = 4
    """How often data is sent: `launch`, then `advance` each time it is called."""

    def __init__(self, world: World, grid: HostGrid, numel: int, *, widest: NodeLayout, dtype: torch.dtype) -> None:
        assert world.group is not None
        self._group, self._rank, self._grid, self._waiter = world.group, world.rank, grid, world.waiter
        self._seen = {peer: world.wait_for(peer) for peer in range(world.size) if peer != world.rank}
        self._host, self._local = divmod(world.rank, grid.per_host)
        self._virtual_ranks = widest.leaves
        self.numel = align_up(max(numel, 1), BUFFER_NUMEL * world.size)
        """The length of the vector, padded so that it divides into aligned segments."""
        counts = [len(nodes) for nodes in widest.nodes]
        self.rows = torch.zeros(counts[world.rank], self.numel, dtype=dtype).unbind()
        """This rank's rows, each of shape [numel]; unused padding stays zero."""
        self._width = self.numel // grid.per_host
        self._part_width = self._width // grid.hosts
        self._local_peers = [(self._local + i) % grid.per_host for i in range(1, grid.per_host)]
        self._host_peers = [(self._host + i) % grid.hosts for i in range(1, grid.hosts)]
        self._local_rows = {
            peer: self.rows[0].new_empty(counts[self._rank_of(self._host, peer)], self._width).unbind()
            for peer in self._local_peers
        }
        self._host_rows = {
            peer: self.rows[0].new_empty(len(self._nodes_of_host(peer, widest.leaves)), self._part_width).unbind()
            for peer in self._host_peers
        }
        self._plans: dict[int, _HostPlan] = {}
        self._plan = self._plan_for(widest)
        self._works: list[tuple[int, dist.Work]] = []
        self._phase = 0

    def start(self, layout: NodeLayout) -> None:
        """Begin a step. The rows may be written after this call."""
        self._plan = self._plans.get(layout.leaves) or self._plan_for(layout)
        self._works, self._phase = [], 0

    def launch(self) -> None:
        """Send this rank's rows within the host; see `AllReduce`. Every rank must launch them in the same order."""
        for peer, rows in self._plan.local_receives:
            self._receive(self._rank_of(self._host, peer), rows)
        for peer in self._local_peers:
            own = [row[self._segment(peer)] for row in self.rows[: self._plan.rows]]
            self._send(self._rank_of(self._host, peer), own)
        self._phase = 1

    def advance(self) -> None:
        """Wait for what has been sent, add it up, and send what follows. Does nothing after the last phase.

        Every rank must call it equally often between other transfers.
        """
        if self._phase >= self.phases:
            return
        self._wait()
        mine = self.rows[0][self._segment(self._local)]
        if self._phase == 1:
            self._plan.add_up_host()
            for peer in self._host_peers:
                other = self._rank_of(peer, self._local)
                self._receive(other, self._plan.host_receives[peer])
                self._send(other, [value[self._part(peer)] for value in self._plan.host_values])
        elif self._phase == 2:
            total = self._plan.add_up_all()
            part = mine[self._part(self._host)]
            if total.data_ptr() != part.data_ptr():
                part.copy_(total)
            for peer in self._host_peers:
                other = self._rank_of(peer, self._local)
                self._receive(other, [mine[self._part(peer)]])
                self._send(other, [part])
        else:
            for peer in self._local_peers:
                other = self._rank_of(self._host, peer)
                self._receive(other, [self.rows[0][self._segment(peer)]])
                self._send(other, [mine])
        self._phase += 1

    @property
    def total(self) -> Tensor:
        """The buffer, of shape [numel], that holds the sum of this step after `finish` and until the next `start`."""
        return self.rows[0]

    def finish(self, step: StepTransaction) -> Tensor:
        """Wait for the sum, and return it."""
        while self._phase < self.phases:
            self.advance()
        self._wait()
        return self.total

    def _plan_for(self, layout: NodeLayout) -> _HostPlan:
        nodes, leaves = layout.nodes, layout.leaves
        values: dict[Node, Tensor] = {}
        receives = []
        for local in range(self._grid.per_host):
            rank = self._rank_of(self._host, local)
            rows = (
                [row[self._segment(local)] for row in self.rows] if local == self._local else [*self._local_rows[local]]
            )[: len(nodes[rank])]
            values.update(zip(nodes[rank], rows, strict=True))
            if local != self._local:
                receives.append((local, rows))
        host_additions: list[tuple[Tensor, Tensor]] = []
        host_values: dict[Node, Tensor] = {}
        for node in self._nodes_of_host(self._host, leaves):
            # A node's part of the tree has the shape of a tree with as many leaves.
            below = {
                Node(each.start - node.start, each.stop - node.start): value
                for each, value in values.items()
                if node.start <= each.start and each.stop <= node.stop
            }
            added, host_values[node] = additions(below, leaves=node.stop - node.start)
            host_additions += added
        host_receives, all_values = {}, {n: v[self._part(self._host)] for n, v in host_values.items()}
        for peer in self._host_peers:
            theirs = self._nodes_of_host(peer, leaves)
            host_receives[peer] = [*self._host_rows[peer][: len(theirs)]]
            all_values.update(zip(theirs, host_receives[peer], strict=True))
        all_additions, total = additions(all_values, leaves=leaves)
        plan = self._plans[leaves] = _HostPlan(
            rows=len(nodes[self._rank]),
            local_receives=sorted(receives, key=lambda each: self._local_peers.index(each[0])),
            host_additions=host_additions,
            host_values=[*host_values.values()],
            host_receives=host_receives,
            all_additions=all_additions,
            total=total,
        )
        return plan

    def _nodes_of_host(self, host: int, leaves: int) -> list[Node]:
        first, last = self._rank_of(host, 0), self._rank_of(host, self._grid.per_host - 1)
        world_size = self._grid.hosts * self._grid.per_host
        begin = rank_block(first, world_size=world_size, virtual_ranks=self._virtual_ranks).start
        end = rank_block(last, world_size=world_size, virtual_ranks=self._virtual_ranks).stop
        return nodes_of(range(begin, end), leaves=leaves)

    def _rank_of(self, host: int, local: int) -> int:
        return host * self._grid.per_host + local

    def _segment(self, local: int) -> slice:
        return slice(local * self._width, (local + 1) * self._width)

    def _part(self, host: int) -> slice:
        return slice(host * self._part_width, (host + 1) * self._part_width)

    def _send(self, rank: int, tensors: Sequence[Tensor]) -> None:
        self._works += [(rank, self._group.send([tensor], rank, 0)) for tensor in tensors]

    def _receive(self, rank: int, tensors: Sequence[Tensor]) -> None:
        self._works += [(rank, self._group.recv([tensor], rank, 0)) for tensor in tensors]

    def _wait(self) -> None:
        for peer, work in self._works:
            self._waiter.wait(work, self._seen[peer])
        self._works = []


@dataclass(frozen=True, kw_only=True, slots=True)
class _HostPlan:
    """The transfers and additions of a step with a given number of leaves, computed once."""

    rows: int
    """How many rows this rank has."""
    local_receives: list[tuple[int, list[Tensor]]]
    """By local rank, where its rows go."""
    host_additions: list[tuple[Tensor, Tensor]]
    """The additions within the host, in place on the left."""
    host_values: list[Tensor]
    """The sums of the host's nodes after them, in order."""
    host_receives: Mapping[int, list[Tensor]]
    """By host, where its sums go."""
    all_additions: list[tuple[Tensor, Tensor]]
    """The additions that finish the tree, in place on the left."""
    total: Tensor
    """The result of this rank's part after them."""

    def add_up_host(self) -> None:
        for left, right in self.host_additions:
            left.add_(right)

    def add_up_all(self) -> Tensor:
        for left, right in self.all_additions:
            left.add_(right)
        return self.total
