"""Reading this rank's part of a map-style dataset, batch by batch, in this process or in workers of torch's DataLoader.

`RankLoaderSettings` determines the samples; `data.rank_loader` is the loop's side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from unisono.data.dataset import map_length, whole_batches
from unisono.data.fetch import Fetcher, Part, Task
from unisono.data.loader_workers import TaskReader
from unisono.data.rank_batch import RankBatch, RankLoaderSettings
from unisono.data.resume_point import ResumePoint

__all__ = ["MapSource"]


class MapSource:
    """This rank's part of a map-style dataset."""

    def __init__(self, dataset: Any, settings: RankLoaderSettings) -> None:
        self.num_samples: int = map_length(dataset)
        """Number of samples of the dataset."""
        if settings.drop_last:
            whole_batches(self.num_samples, settings.batch_size)  # or an error
        self._settings = settings
        fetcher = Fetcher(dataset, settings)
        self._tasks = _RankTasks(settings, self.num_samples)
        self._reader = TaskReader(fetcher, self._tasks)

    def batches(self, start: ResumePoint) -> Iterator[RankBatch]:
        """Yield this rank's batches of an epoch, starting at a position."""
        settings = self._settings
        self._tasks.start = start
        fetched = iter(self._reader)
        end = settings.end(self.num_samples, start=start.position)
        for positions in self._tasks.steps():
            task, (items,) = next(fetched)
            yield RankBatch(
                items=items,
                indices=task.indices,
                positions=positions,
                last=positions.stop == end,
                borrowed=not settings.own(positions),
            )


class _RankTasks(Iterable[Task]):
    """The micro-batches that this rank fetches, one a step, starting at a position."""

    def __init__(self, settings: RankLoaderSettings, num_samples: int) -> None:
        self.start = ResumePoint(0, 0)
        self._settings, self._num_samples = settings, num_samples

    def steps(self) -> Iterator[range]:
        """Yield the positions of each step, over all ranks."""
        settings, start = self._settings, self.start.position
        for step in range(settings.steps(self._num_samples, start=start)):
            yield settings.positions(step, self._num_samples, start=start)

    def __iter__(self) -> Iterator[Task]:
        settings, epoch = self._settings, self.start.epoch
        # A rank without a sample reads the last one of the step.
        positions = (settings.own(step) or step[-1:] for step in self.steps())
        width = max(1, settings.batch_size // settings.ranks)
        batches = settings.order(positions, num_samples=self._num_samples, epoch=epoch, width=width)
        for step, samples in zip(self.steps(), batches, strict=True):
            # The start position identifies the step, since step numbers begin at 0 again after a resume.
            yield Task(epoch, step.start, len(step), [Part(settings.rank, 0, samples.tolist())])
