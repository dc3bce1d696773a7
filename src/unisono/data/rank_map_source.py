"""Reading this rank's part of a map-style dataset, batch by batch, in this process or in workers of torch's DataLoader.

Which samples those are is `RankLoaderSettings`' arithmetic; the loop's side is `data.rank_loader`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from unisono.data.fetch import Fetcher, Task
from unisono.data.map_loader import map_length, whole_batches
from unisono.data.position import Position
from unisono.data.rank_batch import RankBatch, RankLoaderSettings
from unisono.data.workers import TaskReader
from unisono.plan import permute

__all__ = ["MapSource"]

# Permuting few positions costs as much as permuting thousands, so several steps' worth are permuted together.
_PERMUTED_TOGETHER = 8192


class MapSource:
    """This rank's part of a map-style dataset."""

    def __init__(self, dataset: Any, settings: RankLoaderSettings) -> None:
        self.num_samples: int = map_length(dataset)
        """Samples of the dataset."""
        if settings.drop_last:
            whole_batches(self.num_samples, settings.batch_size)  # or an error
        self._settings = settings
        fetcher = Fetcher(dataset, collate_fn=settings.collate_fn, seed=settings.seed, stream="train")
        self._tasks = _Tasks(settings, self.num_samples)
        self._reader = TaskReader(fetcher, self._tasks, workers=settings.workers, pin_memory=settings.pin_memory)

    def portions(self, place: Position) -> Iterator[RankBatch]:
        """Read this rank's part of an epoch from a place on."""
        settings = self._settings
        self._tasks.place = place
        fetched = iter(self._reader)
        end = settings.end(self.num_samples, start=place.position)
        for positions in self._tasks.steps():
            indices, items = next(fetched)
            yield RankBatch(
                items=items,
                indices=indices,
                positions=positions,
                last=positions.stop == end,
                borrowed=not settings.own(positions),
            )


class _Tasks(Iterable[Task]):
    """What this rank fetches, step by step, from a place on."""

    def __init__(self, settings: RankLoaderSettings, num_samples: int) -> None:
        self.place = Position(0, 0)
        self._settings, self._num_samples = settings, num_samples

    def steps(self) -> Iterator[range]:
        """Yield the positions of each step, over all ranks."""
        settings, start = self._settings, self.place.position
        for step in range(settings.steps(self._num_samples, start=start)):
            yield settings.positions(step, self._num_samples, start=start)

    def __iter__(self) -> Iterator[Task]:
        settings, epoch, steps = self._settings, self.place.epoch, self.steps()
        together = max(1, _PERMUTED_TOGETHER * settings.ranks // settings.batch_size)
        while block := list(islice(steps, together)):
            # A rank without a sample reads the last one of the step.
            owns = [settings.own(positions) or positions[-1:] for positions in block]
            order = torch.cat([torch.arange(own.start, own.stop, own.step, device="cpu") for own in owns])
            if settings.shuffle:
                order = permute(order, num_samples=self._num_samples, seed=settings.seed, epoch=epoch)
            for positions, indices in zip(
                block, torch.split_with_sizes(order, [len(own) for own in owns]), strict=True
            ):
                # The start names the step: numbers are counted anew after a resume.
                yield Task(epoch, positions.start, settings.rank, 0, indices.tolist())
