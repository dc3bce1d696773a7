"""How a user's loop divides a dataset among ranks, as arithmetic, and what travels from reading to the loop.

Reading is in `data.rank_map_source` and `data.rank_stream_source`; the loop's side is `data.rank_loader`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.data.settings import LoaderSettings
from unisono.plan import even_range, even_steps

__all__ = ["RankBatch", "RankLoaderSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoaderSettings(LoaderSettings):
    """How a dataset is divided among ranks and read."""

    rank: int
    """Rank that reads."""
    ranks: int
    """Ranks that share a batch."""

    def __post_init__(self) -> None:
        LoaderSettings.__post_init__(self)  # super() knows a class with slots only without them
        if self.batch_size < self.ranks:
            raise ValueError(
                f"batch_size={self.batch_size} is smaller than the number of ranks, {self.ranks}: it counts the "
                f"samples of all ranks together, and each needs at least one. Raise it to {self.ranks} or more."
            )

    def end(self, num_samples: int, *, start: int = 0) -> int:
        """Return where an epoch ends that is read from `start` on."""
        return num_samples - (num_samples - start) % self.batch_size if self.drop_last else num_samples

    def steps(self, num_samples: int, *, start: int = 0) -> int:
        """Return the number of steps from a position of the epoch on."""
        end = self.end(num_samples, start=start)
        return even_steps(end, self.batch_size, ranks=self.ranks, start=start)

    def positions(self, step: int, num_samples: int, *, start: int = 0) -> range:
        """Return the positions of a step, over all ranks; steps are counted from the position `start` on."""
        end = self.end(num_samples, start=start)
        return even_range(step, num_samples=end, batch_size=self.batch_size, ranks=self.ranks, start=start)

    def own(self, positions: range) -> range:
        """Return this rank's positions, divided as DistributedSampler does."""
        return range(positions.start + (self.rank - positions.start) % self.ranks, positions.stop, self.ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBatch:
    """What a rank has of one global batch."""

    items: Any
    """What collate_fn made of the samples."""
    indices: list[int]
    """The samples: indices in the dataset, positions in a stream."""
    positions: range
    """Positions of the global batch."""
    last: bool
    """Whether the epoch ends here."""
    borrowed: bool
    """Whether the rank has no sample of the batch; the items are then one sample of another rank's."""
