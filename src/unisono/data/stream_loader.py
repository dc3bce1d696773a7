"""An iterable dataset, dealt out in global batches like a map-style one.

Every rank iterates over the whole stream and keeps what belongs to its virtual ranks. That costs each rank the reading
of all samples, and gives what a stream cut up by rank cannot: the same bits on any number of ranks, every sample once,
no ranks that run dry before others. It holds if the stream yields the same samples in the same order wherever it is
iterated; random numbers drawn on the way are set from (seed, epoch) at the start and from (seed, epoch, position)
before each sample. There is no shuffling, and a resume in mid-epoch reads up to its place again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from unisono.data.batch import Batch, MicroBatch, Share
from unisono.data.map_loader import TrainerLoaderSettings, check_settings
from unisono.data.workers import Workers, warn_on_stderr
from unisono.errors import DataError
from unisono.plan import derive_key, num_steps
from unisono.state.random import set_generators

__all__ = ["StreamLoader"]


class StreamLoader:
    """This rank's part of every batch of an iterable dataset."""

    def __init__(
        self,
        dataset: IterableDataset[Any],
        settings: TrainerLoaderSettings,
        *,
        tell: Callable[[str], None] = warn_on_stderr,
    ) -> None:
        check_settings(settings)
        if settings.shuffle:
            raise ValueError(
                f"shuffle=True cannot be done for {type(dataset).__name__}: an iterable dataset has the order that it "
                "has. Shuffle inside it (random numbers there follow seed and epoch), and pass shuffle=False."
            )
        length = len(dataset) if hasattr(dataset, "__len__") else None
        self.num_samples: int | None = length
        """Samples of an epoch, None if the dataset does not say."""
        self.steps: int | None = None if length is None else num_steps(length, settings.batch_size)
        """Steps of an epoch, None if the dataset does not say."""
        self._settings = settings
        self._reader = _Reader(dataset, settings)
        self._tell = tell

    @property
    def dealt(self) -> dict[str, Any]:
        """What decides which samples lie in which batch; see `TrainerLoaderSettings.dealt`."""
        return self._settings.dealt(self.num_samples)

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of the batches of an epoch, from a step on.

        Raises: DataError if the stream is empty.
        """
        self._reader.epoch, self._reader.first_step = epoch, first_step
        source: Any = self._reader
        if self._settings.workers:
            # A second worker would read the whole stream once more: one reads ahead of the training.
            source = Workers(self._reader, tasks=None, number=1, pin_memory=self._settings.pin_memory, tell=self._tell)
        step = first_step
        for size, shares in source:
            yield Batch(epoch, step, size, shares)
            step += 1
        if step == 0:
            raise DataError(f"the iterable dataset yielded nothing in epoch {epoch}: check its source or filter")


class _Reader(IterableDataset[Any]):
    """Iterates over the stream and cuts it into batches; yields (size, shares)."""

    def __init__(self, dataset: IterableDataset[Any], settings: TrainerLoaderSettings) -> None:
        self.dataset, self.settings = dataset, settings
        self.epoch = self.first_step = 0

    def __iter__(self) -> Iterator[tuple[int, list[Share]]]:
        settings = self.settings
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        self._set_generators("stream", self.epoch)
        iterator = iter(self.dataset)
        step, ended = 0, False
        while not ended:
            kept: dict[int, list[tuple[int, Any]]] = {v: [] for v in settings.block}
            size = 0
            while size < settings.batch_size:
                position = step * settings.batch_size + size
                self._set_generators("sample", self.epoch, position)
                try:
                    sample = next(iterator)
                except StopIteration:
                    ended = True
                    break
                virtual_rank = size % settings.virtual_ranks
                if virtual_rank in kept:
                    kept[virtual_rank].append((position, sample))
                size += 1
            dropped = settings.drop_last and size < settings.batch_size
            if step >= self.first_step and size and not dropped:
                yield size, [self._share(step, v, samples) for v, samples in kept.items() if samples]
            step += 1

    def _share(self, step: int, virtual_rank: int, samples: list[tuple[int, Any]]) -> Share:
        collate = self.settings.collate_fn or default_collate
        width = self.settings.micro_batch_size or len(samples)
        micro_batches = []
        for part, first in enumerate(range(0, len(samples), width)):
            chunk = samples[first : first + width]
            self._set_generators("collate", self.epoch, step, virtual_rank, part)
            micro_batches.append(MicroBatch(collate([s for _, s in chunk]), [p for p, _ in chunk]))
        return Share(virtual_rank, micro_batches)

    def _set_generators(self, use: str, *coordinates: int) -> None:
        set_generators(derive_key(self.settings.seed, f"{self.settings.stream}/{use}", *coordinates))
