"""The part of an all-reduce between hosts that stays within a host; see `host_tree_all_reduce`.

Each rank of a host has rows of a vector, and finishes one segment of it. So it needs that segment of the rows of the
others, and gives them the finished one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.world import World

__all__ = ["GroupLocalExchange", "LocalExchange"]


class LocalExchange(Protocol):
    """What the ranks of a host give each other in one all-reduce. The calls of a step are in this order."""

    @property
    def rows(self) -> Sequence[Tensor]:
        """This rank's rows, each of the whole vector. The first one has the sum after `finish`."""

    @property
    def total(self) -> Tensor:
        """Where this rank's finished segment is to be written, [width]."""

    def rows_of(self, local: int) -> Sequence[Tensor]:
        """Return where this rank's segment of the rows of a rank of the host is after `wait_for_rows`, [width] each."""

    def send_rows(self, counts: Sequence[int]) -> None:
        """Give the rows to the others of the host, as many as each has in this step, by local rank."""

    def wait_for_rows(self) -> None:
        """Wait for those of the others."""

    def send_total(self) -> None:
        """Give the finished segment to the others."""

    def finish(self) -> None:
        """Wait for those of the others."""


class GroupLocalExchange:
    """An exchange through the process group, for ranks that share no memory.

    Args:
        world: All ranks.
        ranks: Those of this host, in the world.
        counts: The number of rows of each of them.
        numel: The length of the vector, a multiple of the number of ranks of the host.
        dtype: Its type.
    """

    def __init__(
        self, world: World, ranks: Sequence[int], counts: Sequence[int], numel: int, *, dtype: torch.dtype
    ) -> None:
        assert world.group is not None
        self._group, self._waiter, self._ranks = world.group, world.waiter, ranks
        self._local, self._width = ranks.index(world.rank), numel // len(ranks)
        self._peers = [(self._local + i) % len(ranks) for i in range(1, len(ranks))]
        self._seen = {peer: world.wait_for(ranks[peer]) for peer in self._peers}
        self._works: list[tuple[int, dist.Work]] = []
        self.rows: Sequence[Tensor] = torch.zeros(counts[self._local], numel, dtype=dtype).unbind()
        """See `LocalExchange`; unused padding stays zero."""
        self._received = {peer: self.rows[0].new_empty(counts[peer], self._width).unbind() for peer in self._peers}

    @property
    def total(self) -> Tensor:
        """See `LocalExchange`."""
        return self.rows[0][self._segment(self._local)]

    def rows_of(self, local: int) -> Sequence[Tensor]:
        """See `LocalExchange`."""
        if local == self._local:
            return [row[self._segment(local)] for row in self.rows]
        return self._received[local]

    def send_rows(self, counts: Sequence[int]) -> None:
        """See `LocalExchange`."""
        for peer in self._peers:
            for row in self._received[peer][: counts[peer]]:
                self._works.append((peer, self._group.recv([row], self._ranks[peer], 0)))
        for peer in self._peers:
            for row in self.rows[: counts[self._local]]:
                self._works.append((peer, self._group.send([row[self._segment(peer)]], self._ranks[peer], 0)))

    def wait_for_rows(self) -> None:
        """See `LocalExchange`."""
        self._wait()

    def send_total(self) -> None:
        """See `LocalExchange`."""
        for peer in self._peers:
            segment = self.rows[0][self._segment(peer)]
            self._works.append((peer, self._group.recv([segment], self._ranks[peer], 0)))
            self._works.append((peer, self._group.send([self.total], self._ranks[peer], 0)))

    def finish(self) -> None:
        """See `LocalExchange`."""
        self._wait()

    def _segment(self, local: int) -> slice:
        return slice(local * self._width, (local + 1) * self._width)

    def _wait(self) -> None:
        for peer, work in self._works:
            self._waiter.wait(work, self._seen[peer])
        self._works = []
