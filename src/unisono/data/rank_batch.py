"""The division of a dataset among ranks in a user's loop, as arithmetic, and the batch that a source yields.

`data.rank_map_source` and `data.rank_stream_source` read the samples; `data.rank_loader` is the loop's side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from unisono.data.loader_settings import LoaderSettings
from unisono.plan import dealt, even_range, even_steps

__all__ = ["RankBatch", "RankLoaderSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLoaderSettings(LoaderSettings):
    """Settings for dividing a dataset among ranks and reading it."""

    rank: int
    """Rank that reads."""
    ranks: int
    """Number of ranks that share a batch."""

    def __post_init__(self) -> None:
        LoaderSettings.__post_init__(self)  # super() fails: slots=True replaces the class
        if self.batch_size < self.ranks:
            raise ValueError(
                f"batch_size={self.batch_size} is smaller than the number of ranks, {self.ranks}: it counts the "
                f"samples of all ranks together, and each needs at least one. Raise it to {self.ranks} or more."
            )

    def end(self, num_samples: int, *, start: int = 0) -> int:
        """Return the end position of an epoch that is read from `start` on."""
        return num_samples - (num_samples - start) % self.batch_size if self.drop_last else num_samples

    def steps(self, num_samples: int, *, start: int = 0) -> int:
        """Return the number of steps from a position of the epoch on."""
        end = self.end(num_samples, start=start)
        return even_steps(end, self.batch_size, ranks=self.ranks, start=start)

    def positions(self, step: int, num_samples: int, *, start: int = 0) -> range:
        """Return the positions of a step, over all ranks; step 0 begins at the position `start`."""
        end = self.end(num_samples, start=start)
        return even_range(step, num_samples=end, batch_size=self.batch_size, ranks=self.ranks, start=start)

    def own(self, positions: range) -> range:
        """Return this rank's positions among those of a step, wherever in the epoch the step begins."""
        return positions[dealt(self.rank - positions.start, self.ranks)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBatch:
    """The part of one global batch that belongs to a rank."""

    items: Any
    """The result of collate_fn for the samples."""
    indices: list[int]
    """The samples: indices in the dataset, or positions in a stream."""
    positions: range
    """Positions of the global batch in the epoch."""
    last: bool
    """True if the epoch ends with this batch."""
    borrowed: bool
    """True if the rank has no sample of the batch; the items are then one sample of another rank."""
