"""Reading this rank's part of an iterable dataset, batch by batch.

Every rank iterates over the whole stream and keeps its own samples, as in `data.stream_loader`, which says what that
costs and gives. Here the reading runs up to one batch ahead, since the end of the stream decides how the last batches
are cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from unisono.data.map_loader import whole_batches
from unisono.data.position import Position
from unisono.data.rank_batch import RankBatch, RankLoaderSettings
from unisono.data.workers import Workers
from unisono.errors import DataError
from unisono.plan import derive_key
from unisono.state.random import set_generators

__all__ = ["StreamSource"]


class StreamSource:
    """This rank's part of an iterable dataset."""

    def __init__(self, dataset: IterableDataset[Any], settings: RankLoaderSettings) -> None:
        if settings.shuffle:
            raise ValueError(
                f"shuffle=True cannot be done for {type(dataset).__name__}: an iterable dataset has the order that it "
                "has. Shuffle inside it (random numbers there follow seed and epoch), and leave shuffle out."
            )
        self.num_samples: int | None = len(dataset) if hasattr(dataset, "__len__") else None
        """Samples of an epoch, None if the dataset does not say."""
        self._settings = settings
        self._reader = _Reader(dataset, settings)

    def portions(self, place: Position) -> Iterator[RankBatch]:
        """Read this rank's part of an epoch from a place on. Raises: DataError if the stream is empty."""
        self._reader.place = place
        if not self._settings.workers:
            return iter(self._reader)
        # A second worker would read the whole stream once more: one reads ahead of the training.
        return iter(Workers(self._reader, tasks=None, number=1, pin_memory=self._settings.pin_memory))


class _Reader(IterableDataset[RankBatch]):
    """Iterates over the stream and cuts it into batches."""

    def __init__(self, dataset: IterableDataset[Any], settings: RankLoaderSettings) -> None:
        self.dataset, self.settings = dataset, settings
        self.place = Position(0, 0)

    def __iter__(self) -> Iterator[RankBatch]:
        settings, (epoch, start) = self.settings, self.place
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._set_generators("stream", epoch)
        iterator = iter(self.dataset)
        kept: dict[int, Any] = {}
        read = 0
        while True:
            self._set_generators("sample", epoch, read)
            try:
                sample = next(iterator)
            except StopIteration:
                break
            if read >= start:
                # The latest sample is kept for a rank that has none of its own.
                if (read - 1) % settings.ranks != settings.rank:
                    kept.pop(read - 1, None)
                kept[read] = sample
            read += 1
            # Two whole batches are there: the first of them is what it is, however many samples follow.
            if read - start == 2 * settings.batch_size:
                yield self._portion(range(start, start + settings.batch_size), kept, end=None)
                start += settings.batch_size
        if not read:
            raise DataError(f"the iterable dataset yielded nothing in epoch {epoch}: check its source or filter")
        if settings.drop_last:
            whole_batches(read, settings.batch_size)  # or an error
        end = settings.end(read, start=start)
        for step in range(settings.steps(read, start=start)):
            yield self._portion(settings.positions(step, read, start=start), kept, end=end)

    def _portion(self, positions: range, kept: dict[int, Any], *, end: int | None) -> RankBatch:
        settings, epoch = self.settings, self.place.epoch
        own = settings.own(positions)
        borrowed = not own
        samples = [kept[max(kept)]] if borrowed else [kept.pop(position) for position in own]
        self._set_generators("collate", epoch, positions.start, settings.rank)
        return RankBatch(
            items=(settings.collate_fn or default_collate)(samples),
            indices=[max(kept)] if borrowed else list(own),
            positions=positions,
            last=positions.stop == end,
            borrowed=borrowed,
        )

    def _set_generators(self, use: str, *coordinates: int) -> None:
        set_generators(derive_key(self.settings.seed, f"train/{use}", *coordinates))
