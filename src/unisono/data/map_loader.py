"""A map-style dataset, divided into global batches: this rank's micro-batches of every step.

The samples of a virtual rank follow by arithmetic from (seed, epoch, step): nothing is drawn, kept or sent. The dataset
is read in this process or in worker processes of torch's DataLoader, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from unisono.arguments import whole
from unisono.data.batch import Batch, MicroBatch, Share
from unisono.data.dataset import map_length, whole_batches
from unisono.data.fetch import Fetcher, Task
from unisono.data.settings import LoaderSettings
from unisono.data.workers import TaskReader, warn_on_stderr
from unisono.plan import num_steps, share_positions, step_size

__all__ = ["MapLoader", "TrainerLoaderSettings"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLoaderSettings(LoaderSettings):
    """Settings for dividing a dataset among virtual ranks and reading it."""

    virtual_ranks: int
    """Number of shares of a global batch."""
    block: range
    """This rank's virtual ranks."""
    micro_batch_size: int | None = None
    """Maximum number of samples that go through the model at once; None: a whole share."""

    def __post_init__(self) -> None:
        LoaderSettings.__post_init__(self)  # super() fails: slots=True replaces the class
        if self.batch_size < self.virtual_ranks:
            raise ValueError(
                f"batch_size={self.batch_size} is smaller than virtual_ranks={self.virtual_ranks}: batch_size "
                "counts the samples of all ranks together, and each virtual rank needs at least one. Raise batch_size "
                f"to {self.virtual_ranks} or more, or give Trainer fewer virtual_ranks."
            )
        if self.micro_batch_size is not None:
            size = whole("micro_batch_size", self.micro_batch_size)
            object.__setattr__(self, "micro_batch_size", size)
            if size < 1:
                raise ValueError(f"micro_batch_size={size} must be at least 1, or None for whole shares")


class MapLoader:
    """This rank's part of every batch of a map-style dataset."""

    def __init__(
        self, dataset: Any, settings: TrainerLoaderSettings, *, tell: Callable[[str], None] = warn_on_stderr
    ) -> None:
        length = map_length(dataset)
        self.num_samples: int = whole_batches(length, settings.batch_size) if settings.drop_last else length
        """Number of samples in an epoch."""
        self.steps: int = num_steps(self.num_samples, settings.batch_size)
        """Number of steps in an epoch."""
        self._settings = settings
        fetcher = Fetcher(dataset, settings)
        self._tasks = _TrainerTasks(settings, self.num_samples, length)
        self._reader = TaskReader(
            fetcher, self._tasks, workers=settings.workers, pin_memory=settings.pin_memory, tell=tell
        )

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide which samples are in which batch; see `LoaderSettings.identity`."""
        return self._settings.identity(self.num_samples)

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of an epoch, starting at `first_step`."""
        self._tasks.epoch, self._tasks.first_step = epoch, first_step
        fetched, settings = iter(self._reader), self._settings
        for step in range(first_step, self.steps):
            shares = []
            for virtual_rank, parts in self._tasks.parts_of(step):
                pairs = [next(fetched) for _ in range(parts)]
                shares.append(Share(virtual_rank, [MicroBatch(items, indices) for indices, items in pairs]))
            size = step_size(step, num_samples=self.num_samples, batch_size=settings.batch_size)
            yield Batch(epoch, step, size, shares)


class _TrainerTasks(Iterable[Task]):
    """The micro-batches that this rank fetches in an epoch, in order."""

    def __init__(self, settings: TrainerLoaderSettings, num_samples: int, length: int) -> None:
        self.epoch = self.first_step = 0
        self._settings, self._num_samples = settings, num_samples
        self._steps = num_steps(num_samples, settings.batch_size)
        # With drop_last an epoch leaves out the end of its order, not of the dataset: other samples in each epoch.
        self._length = length

    def __iter__(self) -> Iterator[Task]:
        settings, epoch, batch_size = self._settings, self.epoch, self._settings.batch_size
        steps = range(self.first_step, self._steps)
        positions = (range(i * batch_size, min((i + 1) * batch_size, self._num_samples)) for i in steps)
        batches = settings.order(positions, num_samples=self._length, epoch=epoch, width=batch_size)
        for step, samples in zip(steps, batches, strict=True):
            for virtual_rank in settings.block:
                # The division of `share_positions`, applied to samples in their order.
                indices = samples[virtual_rank :: settings.virtual_ranks].tolist()
                width = settings.micro_batch_size or max(len(indices), 1)
                for part, first in enumerate(range(0, len(indices), width)):
                    yield Task(epoch, step, virtual_rank, part, indices[first : first + width])

    def parts_of(self, step: int) -> Iterator[tuple[int, int]]:
        """Yield each virtual rank of this rank with samples in a step, and the number of its micro-batches."""
        settings = self._settings
        for virtual_rank in settings.block:
            length = len(
                share_positions(
                    step,
                    virtual_rank,
                    num_samples=self._num_samples,
                    batch_size=settings.batch_size,
                    virtual_ranks=settings.virtual_ranks,
                )
            )
            if length:
                yield virtual_rank, num_steps(length, settings.micro_batch_size or length)
