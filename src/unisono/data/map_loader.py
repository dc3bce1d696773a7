"""A map-style dataset, divided into global batches: this rank's micro-batches of every step.

The samples of a virtual rank follow by arithmetic from (seed, epoch, step): nothing is drawn, kept or sent. The dataset
is read in this process or in worker processes of torch's DataLoader, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from unisono.arguments import whole
from unisono.data.batch import Batch, MicroBatch, Share
from unisono.data.dataset import map_length, whole_batches
from unisono.data.fetch import Fetcher, NoteSamples, Part, Task
from unisono.data.loader_settings import PERMUTED_TOGETHER, LoaderSettings
from unisono.data.loader_workers import TaskReader, warn_on_stderr
from unisono.plan import dealt, num_steps

__all__ = ["MapLoader", "StepSamples", "TrainerLoaderSettings"]


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


class StepSamples(NamedTuple):
    """The samples of one step, over all virtual ranks."""

    epoch: int
    step: int
    samples: list[int]
    start: int | None = None
    """Position of the first one in the epoch, if random numbers belong to positions and not to samples."""


class MapLoader:
    """This rank's part of every batch of a map-style dataset."""

    def __init__(
        self,
        dataset: Any,
        settings: TrainerLoaderSettings,
        *,
        tell: Callable[[str], None] = warn_on_stderr,
        noting: Callable[[], NoteSamples | None] = lambda: None,
    ) -> None:
        length = map_length(dataset)
        self.num_samples: int = whole_batches(length, settings.batch_size) if settings.drop_last else length
        """Number of samples in an epoch."""
        self.steps: int = num_steps(self.num_samples, settings.batch_size)
        """Number of steps in an epoch."""
        self.settings, self.length = settings, length
        self._dataset, self._tell, self._noting = dataset, tell, noting
        fetcher = Fetcher(dataset, settings)
        self._tasks = _TrainerTasks(settings)
        self._reader = TaskReader(fetcher, self._tasks, tell=tell, noting=noting)

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide which samples are in which batch; see `LoaderSettings.identity`."""
        return self.settings.identity(self.num_samples)

    def divided(self, block: range) -> MapLoader:
        """Return the loader of a rank with other virtual ranks."""
        return MapLoader(self._dataset, replace(self.settings, block=block), tell=self._tell, noting=self._noting)

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of an epoch, starting at `first_step`."""
        return self.read(self.order(epoch, first_step))

    def read(self, steps: Iterable[StepSamples]) -> Iterator[Batch]:
        """Yield this rank's part of each of some global batches."""
        self._tasks.steps = steps
        for task, found in self._reader:
            shares: list[Share] = []
            for part, items in zip(task.parts, found, strict=True):
                micro_batch = MicroBatch(items, part.indices)
                if part.number:
                    shares[-1].micro_batches.append(micro_batch)
                else:
                    shares.append(Share(part.virtual_rank, [micro_batch]))
            yield Batch(task.epoch, task.step, task.size, shares)

    def order(self, epoch: int, first_step: int) -> Iterator[StepSamples]:
        """Yield the global batches of an epoch, which follow by arithmetic."""
        settings, batch_size = self.settings, self.settings.batch_size
        # With drop_last an epoch leaves out the end of its order, not of the dataset: other samples in each epoch.
        together = max(1, PERMUTED_TOGETHER // batch_size)
        for block in range(first_step, self.steps, together):
            first, end = block * batch_size, min((block + together) * batch_size, self.num_samples)
            order = settings.samples_at(range(first, end), num_samples=self.length, epoch=epoch).tolist()
            for start in range(0, end - first, batch_size):
                yield StepSamples(epoch, block + start // batch_size, order[start : start + batch_size])


class _TrainerTasks(Iterable[Task]):
    """The part of each step that this rank fetches, in order."""

    def __init__(self, settings: TrainerLoaderSettings) -> None:
        self.steps: Iterable[StepSamples] = ()
        self._settings = settings
        self._dealt = [(v, dealt(v, settings.virtual_ranks)) for v in settings.block]

    def __iter__(self) -> Iterator[Task]:
        most = self._settings.micro_batch_size
        for epoch, step, samples, start in self.steps:
            parts: list[Part] = []
            if most is None and start is None:  # in half the time
                parts = [Part(v, 0, own) for v, own_part in self._dealt if (own := samples[own_part])]
                yield Task(epoch, step, len(samples), parts)
                continue
            for virtual_rank, own_part in self._dealt:
                indices = samples[own_part]
                width = most or len(indices)
                positions = None if start is None else range(start, start + len(samples))[own_part]
                for number, first in enumerate(range(0, len(indices), width or 1)):
                    some = None if positions is None else positions[first : first + width]
                    parts.append(Part(virtual_rank, number, indices[first : first + width], some))
            yield Task(epoch, step, len(samples), parts)
