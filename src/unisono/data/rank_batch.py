"""How a user's loop deals out a dataset, as arithmetic, and what travels from reading to the loop.

Reading is in `data.rank_map_source` and `data.rank_stream_source`; the loop's side is `data.rank_loader`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.arguments import flag
from unisono.data.fetch import Collate, check_collate
from unisono.data.position import check_whole
from unisono.plan import even_range, even_steps

__all__ = ["RankBatch", "RankLoaderSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoaderSettings:
    """How a dataset is dealt out among ranks and read. Raises: ValueError, TypeError if they cannot be meant."""

    batch_size: int
    """Samples of a global batch, over all ranks."""
    rank: int
    """Rank that reads."""
    ranks: int
    """Ranks that share a batch."""
    seed: int
    """Root of the order and of the dataset's random numbers."""
    shuffle: bool
    """A new order every epoch, or the dataset's own."""
    workers: int
    """Processes that read ahead."""
    drop_last: bool
    """Leave out the last batch of an epoch if it is smaller than the others."""
    collate_fn: Collate | None
    """Makes a batch of a list of samples; None: torch's default_collate."""
    pin_memory: bool
    """Read into page-locked memory."""

    def __post_init__(self) -> None:
        check_whole(batch_size=self.batch_size, seed=self.seed, workers=self.workers)
        for name in ("shuffle", "drop_last", "pin_memory"):
            flag(name, getattr(self, name))
        check_collate(self.collate_fn)
        if self.batch_size < self.ranks:
            raise ValueError(
                f"batch_size={self.batch_size} is smaller than the number of ranks, {self.ranks}: it counts the "
                f"samples of all ranks together, and each needs at least one. Raise it to {self.ranks} or more."
            )
        if self.workers < 0:
            raise ValueError(f"workers={self.workers} must be 0 (read in the training process) or more")

    def end(self, num_samples: int, *, start: int = 0) -> int:
        """Say where an epoch ends that is read from `start` on."""
        return num_samples - (num_samples - start) % self.batch_size if self.drop_last else num_samples

    def steps(self, num_samples: int, *, start: int = 0) -> int:
        """Count the steps from a position of the epoch on."""
        end = self.end(num_samples, start=start)
        return even_steps(end, self.batch_size, ranks=self.ranks, start=start)

    def positions(self, step: int, num_samples: int, *, start: int = 0) -> range:
        """Give the positions of a step, over all ranks; steps are counted from the position `start` on."""
        end = self.end(num_samples, start=start)
        return even_range(step, num_samples=end, batch_size=self.batch_size, ranks=self.ranks, start=start)

    def own(self, positions: range) -> range:
        """Deal out positions: this rank's, as DistributedSampler deals."""
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
