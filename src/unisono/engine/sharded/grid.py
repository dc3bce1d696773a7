"""Which ranks keep which part of a divided model: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShardGrid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardGrid:
    """The place of a rank among replicas of a model that are each divided over ranks that follow each other.

    >>> grid = ShardGrid(rank=5, ranks=6, replicas=2)
    >>> grid.shards, list(grid.replica), list(grid.holders(5))
    (3, [3, 4, 5], [2, 5])
    """

    rank: int
    ranks: int
    replicas: int = 1
    """How many times the weights are there; it divides the number of ranks."""
    stays_apart: bool = False
    """True if weights come together for a moment alone, also on a rank that has all of them."""

    def __post_init__(self) -> None:
        """Check the numbers, which callers have checked with better messages."""
        assert self.ranks % self.replicas == 0

    @property
    def shards(self) -> int:
        """The number of ranks over which each replica is divided."""
        return self.ranks // self.replicas

    @property
    def keeps_weights(self) -> bool:
        """True if each rank keeps all weights, so that only gradients and the optimizer's state are divided."""
        return self.shards == 1 and not self.stays_apart

    @property
    def replica(self) -> range:
        """The ranks that have this rank's replica together."""
        first = self.rank // self.shards * self.shards
        return range(first, first + self.shards)

    def holders(self, rank: int) -> range:
        """Return the ranks that keep the same weights as a rank, one of each replica."""
        return range(rank % self.shards, self.ranks, self.shards)
