"""All-reduce of one vector between hosts: ranks of a host add up first, so each host sends a sum once and not per rank.

Let there be H hosts with L ranks each. Rank j of every host takes segment j of the vector:
1. within a host, each rank gives segment j of its rows to local rank j, which adds them up to the tree's nodes of the
   host;
2. between hosts, the ranks j send part h of these sums to the rank j of host h, which finishes the tree there,
3. and sends the result to the other ranks j;
4. within a host, each rank gives its finished segment to the others.
Within a host, ranks share the memory of rows, or send them (`local_exchange`). The additions are those of the tree, so
the bits are those of `TreeAllReduce`. If the leaves of a host are one node, as with a power of two of leaves for each
host, it sends 2(H-1)/H of the vector, as in a ring all-reduce over hosts. With m nodes it is (m+1)(H-1)/H.
Start reading at `HostTreeAllReduce.advance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.world import World
from unisono.engine.copied_all_reduce import CopiedAllReduce
from unisono.engine.early_receives import EarlyReceives
from unisono.engine.local_all_reduce import LocalAllReduce
from unisono.engine.local_exchange import GroupLocalExchange, LocalExchange
from unisono.engine.shared.shared_local_exchange import SharedLocalExchange
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tree_all_reduce import DIRECT_NBYTES, NodeLayout, TreeAllReduce, additions
from unisono.plan import Node, nodes_of, rank_block
from unisono.plan.alignment import BUFFER_NUMEL, align_up

__all__ = ["GroupAllReduce", "HostGrid", "HostRanks", "HostTreeAllReduce", "group_all_reduce"]


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


@dataclass(frozen=True, slots=True)
class HostRanks:
    """The ranks of this host among those of several."""

    grid: HostGrid
    """All hosts."""
    runtime: SharedRuntime | None = None
    """The memory that the ranks of this host share; None if they share none."""

    @classmethod
    def sharing(cls, world: World, grid: HostGrid, everyone: Sequence[tuple[str, str]]) -> HostRanks:
        """Make the memory that the ranks of this host share. Every rank must call it.

        Args:
            world: The ranks of all hosts.
            grid: The hosts.
            everyone: For each rank, a name that no other rank or runtime has, and its process, as `own_process` says.
        """
        host, local = divmod(world.rank, grid.per_host)
        ranks = range(host * grid.per_host, (host + 1) * grid.per_host)
        names, processes = zip(*(everyone[rank] for rank in ranks), strict=True)
        of_host = replace(world, rank=local, size=grid.per_host)  # with the store and the timeout of all
        return cls(grid, SharedRuntime(of_host, f"unisono/{names[0]}", processes, ranks=ranks))


def group_all_reduce(
    world: World,
    hosts: HostRanks | None,
    numel: int,
    *,
    widest: NodeLayout,
    dtype: torch.dtype,
    device: torch.device,
    early: EarlyReceives | None = None,
) -> GroupAllReduce:
    """Make the all-reduce of a vector through the process group. Every rank must call it.

    Args:
        hosts: The hosts of the ranks; None if they do not form a grid, or there is one host.
        early: Receives short vectors early; None on one host.
    """
    if world.size == 1:
        return LocalAllReduce(numel, dtype=dtype, device=device)
    if device.type != world.device.type:
        return CopiedAllReduce(world, numel, widest=widest, dtype=dtype, device=device)
    if hosts is None or device.type != "cpu" or numel * dtype.itemsize <= DIRECT_NBYTES:
        return TreeAllReduce(world, numel, widest=widest, dtype=dtype, device=device, early=early)
    return HostTreeAllReduce(world, hosts, numel, widest=widest, dtype=dtype)


class HostTreeAllReduce:
    """An all-reduce of CPU ranks of several hosts; see `AllReduce`. Its buffers are kept between steps.

    Args:
        world: The ranks of all hosts.
        hosts: The ranks of this host among them.
        numel: The length of the vector.
        widest: The layout with all virtual ranks, which has the most nodes on every rank.
        dtype: The type of the vector.
    """

    phases = 4
    """How often data is sent: `launch`, then `advance` each time it is called."""

    def __init__(self, world: World, hosts: HostRanks, numel: int, *, widest: NodeLayout, dtype: torch.dtype) -> None:
        assert world.group is not None
        grid, runtime = hosts.grid, hosts.runtime
        self._group, self._grid, self._waiter = world.group, grid, world.waiter
        self._host, self._local = divmod(world.rank, grid.per_host)
        self._virtual_ranks = widest.leaves
        self.numel = align_up(max(numel, 1), BUFFER_NUMEL * world.size)
        """The length of the vector, padded so that it divides into aligned segments."""
        self._part_width = self.numel // world.size
        ranks = [self._rank_of(self._host, local) for local in range(grid.per_host)]
        counts = [len(widest.nodes[rank]) for rank in ranks]
        self._exchange: LocalExchange
        if runtime is None:
            self._exchange = GroupLocalExchange(world, ranks, counts, self.numel, dtype=dtype)
        else:
            self._exchange = SharedLocalExchange(world, runtime, ranks, counts, self.numel, dtype=dtype)
        self.rows = self._exchange.rows
        """This rank's rows, each of shape [numel]; unused padding stays zero."""
        self._host_peers = [(self._host + i) % grid.hosts for i in range(1, grid.hosts)]
        self._seen = {peer: world.wait_for(self._rank_of(peer, self._local)) for peer in self._host_peers}
        self._host_rows = {
            peer: torch.empty(len(self._nodes_of_host(peer, widest.leaves)), self._part_width, dtype=dtype).unbind()
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
        """Give this rank's rows to the host; see `AllReduce`. Every rank must launch them in the same order."""
        self._exchange.send_rows(self._plan.counts)
        self._phase = 1

    def advance(self) -> None:
        """Wait for what has been sent, add it up, and send what follows. Does nothing after the last phase.

        Every rank must call it equally often between other transfers.
        """
        if self._phase >= self.phases:
            return
        total = self._exchange.total
        if self._phase == 1:
            self._exchange.wait_for_rows()
            self._plan.add_up_host()
            for peer in self._host_peers:
                self._receive(peer, self._plan.host_receives[peer])
                self._send(peer, [value[self._part(peer)] for value in self._plan.host_values])
        elif self._phase == 2:
            self._wait()
            summed, part = self._plan.add_up_all(), total[self._part(self._host)]
            if summed.data_ptr() != part.data_ptr():
                part.copy_(summed)
            for peer in self._host_peers:
                self._receive(peer, [total[self._part(peer)]])
                self._send(peer, [part])
        else:
            self._wait()
            self._exchange.send_total()
        self._phase += 1

    @property
    def total(self) -> Tensor:
        """The buffer, of shape [numel], that holds the sum of this step after `finish` and until the next `start`."""
        return self.rows[0]

    def finish(self, step: StepTransaction) -> Tensor:
        """Wait for the sum, and return it."""
        while self._phase < self.phases:
            self.advance()
        self._exchange.finish()
        return self.total

    def _plan_for(self, layout: NodeLayout) -> _HostPlan:
        nodes, leaves = layout.nodes, layout.leaves
        values: dict[Node, Tensor] = {}
        counts = []
        for local in range(self._grid.per_host):
            own = nodes[self._rank_of(self._host, local)]
            counts.append(len(own))
            values.update(zip(own, self._exchange.rows_of(local)[: len(own)], strict=True))
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
            counts=counts,
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

    def _part(self, host: int) -> slice:
        return slice(host * self._part_width, (host + 1) * self._part_width)

    def _send(self, host: int, tensors: Sequence[Tensor]) -> None:
        rank = self._rank_of(host, self._local)
        self._works += [(host, self._group.send([tensor], rank, 0)) for tensor in tensors]

    def _receive(self, host: int, tensors: Sequence[Tensor]) -> None:
        rank = self._rank_of(host, self._local)
        self._works += [(host, self._group.recv([tensor], rank, 0)) for tensor in tensors]

    def _wait(self) -> None:
        for peer, work in self._works:
            self._waiter.wait(work, self._seen[peer])
        self._works = []


@dataclass(frozen=True, kw_only=True, slots=True)
class _HostPlan:
    """The transfers and additions of a step with a given number of leaves, computed once."""

    counts: Sequence[int]
    """How many rows each rank of the host has."""
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


GroupAllReduce = TreeAllReduce | HostTreeAllReduce | CopiedAllReduce | LocalAllReduce
"""The kinds of all-reduce through a process group."""
