"""Reading this rank's part of an iterable dataset, batch by batch.

Every rank iterates over the whole stream and keeps its own samples; `data.stream_loader` describes the cost and the
benefit. Here reading is up to one batch ahead, since the end of the stream determines the sizes of the last batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from unisono.data.dataset import read_ahead, stream_length, stream_samples, whole_batches
from unisono.data.rank_batch import RankBatch, RankLoaderSettings
from unisono.data.resume_point import ResumePoint
from unisono.errors import DataError
from unisono.plan import owner

__all__ = ["StreamSource"]


class StreamSource:
    """This rank's part of an iterable dataset."""

    def __init__(self, dataset: IterableDataset[Any], settings: RankLoaderSettings) -> None:
        self.num_samples = stream_length(dataset, settings)
        """Number of samples in an epoch; None if the dataset has no length."""
        self._settings = settings
        self._stream = _RankStream(dataset, settings)

    def batches(self, start: ResumePoint) -> Iterator[RankBatch]:
        """Return an iterator over this rank's batches of an epoch, starting at a position.

        Raises:
            DataError: The stream is empty, `drop_last` leaves no batch, or a worker process has died.
        """
        self._stream.start = start
        return read_ahead(self._stream, self._settings)


class _RankStream(IterableDataset[RankBatch]):
    """Iterates over the stream and cuts it into batches."""

    def __init__(self, dataset: IterableDataset[Any], settings: RankLoaderSettings) -> None:
        self.dataset, self.settings = dataset, settings
        self.start = ResumePoint(0, 0)

    def __iter__(self) -> Iterator[RankBatch]:
        settings, (epoch, start) = self.settings, self.start
        kept: dict[int, Any] = {}
        read = 0
        for sample in stream_samples(self.dataset, settings, epoch=epoch):
            if read >= start:
                # The latest sample is kept in case this rank has none of a batch.
                if owner(read - 1, settings.ranks) != settings.rank:
                    kept.pop(read - 1, None)
                kept[read] = sample
            read += 1
            # Two whole batches are there: the first is fixed, however many samples follow.
            if read - start == 2 * settings.batch_size:
                yield self._batch(range(start, start + settings.batch_size), kept, end=None)
                start += settings.batch_size
        if not read:
            raise DataError(f"the iterable dataset yielded nothing in epoch {epoch}: check its source or filter")
        if settings.drop_last:
            whole_batches(read, settings.batch_size)  # or an error
        end = settings.end(read, start=start)
        for step in range(settings.steps(read, start=start)):
            yield self._batch(settings.positions(step, read, start=start), kept, end=end)

    def _batch(self, positions: range, kept: dict[int, Any], *, end: int | None) -> RankBatch:
        settings, epoch = self.settings, self.start.epoch
        own = settings.own(positions)
        borrowed = not own
        samples = [kept[max(kept)]] if borrowed else [kept.pop(position) for position in own]
        settings.set_generators("collate", epoch, positions.start, settings.rank)
        return RankBatch(
            items=(settings.collate_fn or default_collate)(samples),
            indices=[max(kept)] if borrowed else list(own),
            positions=positions,
            last=positions.stop == end,
            borrowed=borrowed,
        )
