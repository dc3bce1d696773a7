"""An iterable dataset, divided into global batches like a map-style one.

Every rank iterates over the whole stream and keeps the samples of its virtual ranks. Each rank therefore reads all
samples. In return, unlike with a stream divided by rank, the bits are the same on any number of ranks, every sample
comes once, and no rank runs out of samples before others. The stream must yield the same samples in the same order
wherever it is iterated; random generators are set from (seed, epoch) at the start and from (seed, epoch, position)
before each sample. There is no shuffling, and a resume in mid-epoch reads the stream up to its place again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from unisono.data.batch import Batch, MicroBatch, Share
from unisono.data.dataset import read_ahead, stream_length, stream_samples, whole_batches
from unisono.data.loader_workers import warn_on_stderr
from unisono.data.map_loader import TrainerLoaderSettings
from unisono.errors import DataError
from unisono.plan import num_steps, owner

__all__ = ["StreamLoader", "read_share"]


class StreamLoader:
    """This rank's part of every batch of an iterable dataset."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        settings: TrainerLoaderSettings,
        *,
        tell: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        length = stream_length(dataset, settings)
        if length is not None and settings.drop_last:
            length = whole_batches(length, settings.batch_size)
        self.num_samples: int | None = length
        """Number of samples in an epoch; None if the dataset has no length."""
        self.steps: int | None = None if length is None else num_steps(length, settings.batch_size)
        """Number of steps in an epoch; None if the dataset has no length."""
        self._settings, self._dataset = settings, dataset
        self._stream = _TrainerStream(dataset, settings)
        self._tell = tell

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide which samples are in which batch; see `LoaderSettings.identity`."""
        return self._settings.identity(self.num_samples)

    def divided(self, block: range) -> StreamLoader:
        """Return the loader of a rank with other virtual ranks."""
        return StreamLoader(self._dataset, replace(self._settings, block=block), tell=self._tell)

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of an epoch, starting at `first_step`.

        Raises:
            DataError: The stream is empty, `drop_last` leaves no batch, the stream ends before `first_step`, or a
                worker process has died.
        """
        self._stream.epoch, self._stream.first_step = epoch, first_step
        step = first_step
        for size, shares in read_ahead(self._stream, self._settings, tell=self._tell):
            yield Batch(epoch, step, size, shares)
            step += 1


class _TrainerStream(IterableDataset[Any]):
    """Iterates over the stream and cuts it into batches; yields (size, shares)."""

    def __init__(self, dataset: IterableDataset[Any], settings: TrainerLoaderSettings) -> None:
        self.dataset, self.settings = dataset, settings
        self.epoch = self.first_step = 0

    def __iter__(self) -> Iterator[tuple[int, list[Share]]]:
        settings = self.settings
        samples = stream_samples(self.dataset, settings, epoch=self.epoch)
        for step in count():
            kept: dict[int, list[tuple[int, Any]]] = {v: [] for v in settings.block}
            size = 0
            for sample in islice(samples, settings.batch_size):
                virtual_rank = owner(size, settings.virtual_ranks)
                if virtual_rank in kept:
                    kept[virtual_rank].append((step * settings.batch_size + size, sample))
                size += 1
            dropped = settings.drop_last and size < settings.batch_size
            if step >= self.first_step and size and not dropped:
                yield size, [read_share(settings, self.epoch, step, v, own) for v, own in kept.items() if own]
            if size < settings.batch_size:
                self._check_end(step * settings.batch_size + size)
                return

    def _check_end(self, read: int) -> None:
        """Raise DataError if this many samples make no batch, or fewer than the run has already had of this epoch."""
        batch_size = self.settings.batch_size
        if not read:
            raise DataError(f"the iterable dataset yielded nothing in epoch {self.epoch}: check its source or filter")
        used = whole_batches(read, batch_size) if self.settings.drop_last else read
        if self.first_step > num_steps(used, batch_size):
            raise DataError(
                f"the iterable dataset yielded {read} samples in epoch {self.epoch}, and the run has already done "
                f"{self.first_step} steps of it, of {batch_size} samples each: it must yield the same samples in the "
                "same order each time."
            )


def read_share(
    settings: TrainerLoaderSettings, epoch: int, step: int, virtual_rank: int, samples: Sequence[tuple[int, Any]]
) -> Share:
    """Return the share that a virtual rank has of a step, from its samples and their numbers."""
    collate = settings.collate_fn or default_collate
    width = settings.micro_batch_size or len(samples)
    micro_batches = []
    for part, first in enumerate(range(0, len(samples), width)):
        chunk = samples[first : first + width]
        settings.set_generators("collate", epoch, step, virtual_rank, part)
        micro_batches.append(MicroBatch(collate([s for _, s in chunk]), [p for p, _ in chunk]))
    return Share(virtual_rank, micro_batches)
