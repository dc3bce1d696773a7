"""A map-style dataset in the order of a sampler: this rank's micro-batches of every step of one epoch.

`data.sampled_order` reads the order and `data.map_loader` the samples. An index may occur several times in an epoch, so
random numbers belong to (seed, epoch, position in the order) and not to the sample: each occurrence has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unisono.data.batch import Batch
from unisono.data.map_loader import MapLoader
from unisono.data.sampled_order import SampledOrder

__all__ = ["SampledLoader"]


class SampledLoader:
    """This rank's part of every batch of one epoch.

    Args:
        loader: The loader of the dataset.
        order: The order of the epoch.
        batch_size: Samples of a global batch; None if they vary.
        drop_last: True if the order leaves out a smaller last batch.
    """

    def __init__(self, loader: MapLoader, order: SampledOrder, *, batch_size: int | None, drop_last: bool) -> None:
        self._loader, self._order, self._batch_size, self._drop_last = loader, order, batch_size, drop_last
        self.num_samples: int = len(order.indices)
        """Number of indices of the epoch."""
        self.steps: int = len(order.ends)
        """Number of steps of the epoch."""

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide which samples are in which batch, by name."""
        return {
            "batch_size": self._batch_size,
            "num_samples": self.num_samples,
            "shuffle": False,
            "drop_last": self._drop_last,
            "order": self._order.fingerprint,
        }

    def divided(self, block: range) -> SampledLoader:
        """Return the loader of a rank with other virtual ranks."""
        loader = self._loader.divided(block)
        return SampledLoader(loader, self._order, batch_size=self._batch_size, drop_last=self._drop_last)

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of the order's epoch, starting at `first_step`."""
        assert epoch == self._order.epoch
        return self._loader.read(self._order.batches(first_step))
