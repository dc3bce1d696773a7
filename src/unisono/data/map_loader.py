"""A map-style dataset, dealt out in global batches: this rank's micro-batches of every step.

Which samples a virtual rank gets is arithmetic on (seed, epoch, step): nothing is drawn, kept or sent. The dataset is
read in this process or in worker processes of torch's DataLoader, which give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from unisono.data.batch import Batch, MicroBatch, Share
from unisono.data.fetch import Collate, Fetcher, Task
from unisono.data.workers import TaskReader, warn_on_stderr
from unisono.errors import DataError
from unisono.plan import num_steps, permute, share_positions, step_size

__all__ = ["MapLoader", "TrainerLoaderSettings", "check_settings", "map_length", "whole_batches"]

# Permuting few positions costs as much as permuting thousands, so several steps' worth are permuted together.
_PERMUTED_TOGETHER = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerLoaderSettings:
    """How a dataset is dealt out and read. The first group changes results, the second only speed."""

    batch_size: int
    """Samples of a global batch, over all ranks."""
    virtual_ranks: int
    """Shares of a global batch."""
    seed: int
    """The run's seed."""
    shuffle: bool
    """A new order every epoch, or the dataset's own."""
    micro_batch_size: int | None = None
    """At most so many samples go through the model at once; None: a whole share."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller than the others."""
    collate_fn: Collate | None = None
    """Makes a micro-batch of a list of samples; None: torch's default_collate."""
    stream: str = "train"
    """Name of the streams of random numbers."""

    block: range
    """This rank's virtual ranks."""
    workers: int = 0
    """Worker processes of this rank; 0 reads in the training process."""
    pin_memory: bool = False
    """Read into page-locked memory, for copies to a GPU."""

    def dealt(self, num_samples: int | None) -> dict[str, Any]:
        """Return what decides which samples lie in which batch, beside the run's constants.

        Args:
            num_samples: Samples of an epoch; None if the dataset does not say.
        """
        return {
            "batch_size": self.batch_size,
            "num_samples": num_samples,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }


class MapLoader:
    """This rank's part of every batch of a map-style dataset."""

    def __init__(
        self, dataset: Any, settings: TrainerLoaderSettings, *, tell: Callable[[str], None] = warn_on_stderr
    ) -> None:
        check_settings(settings)
        length = map_length(dataset)
        self.num_samples: int = whole_batches(length, settings.batch_size) if settings.drop_last else length
        """Samples of an epoch."""
        self.steps: int = num_steps(self.num_samples, settings.batch_size)
        """Steps of an epoch."""
        self._settings = settings
        fetcher = Fetcher(dataset, collate_fn=settings.collate_fn, seed=settings.seed, stream=settings.stream)
        self._tasks = _Tasks(settings, self.num_samples, length)
        self._reader = TaskReader(
            fetcher, self._tasks, workers=settings.workers, pin_memory=settings.pin_memory, tell=tell
        )

    @property
    def dealt(self) -> dict[str, Any]:
        """What decides which samples lie in which batch; see `TrainerLoaderSettings.dealt`."""
        return self._settings.dealt(self.num_samples)

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of the batches of an epoch, from a step on."""
        self._tasks.epoch, self._tasks.first_step = epoch, first_step
        fetched, settings = iter(self._reader), self._settings
        for step in range(first_step, self.steps):
            shares = []
            for virtual_rank, parts in self._tasks.parts_of(step):
                pairs = [next(fetched) for _ in range(parts)]
                shares.append(Share(virtual_rank, [MicroBatch(items, indices) for indices, items in pairs]))
            size = step_size(step, num_samples=self.num_samples, batch_size=settings.batch_size)
            yield Batch(epoch, step, size, shares)


class _Tasks(Iterable[Task]):
    """The micro-batches that this rank fetches in an epoch, in order."""

    def __init__(self, settings: TrainerLoaderSettings, num_samples: int, length: int) -> None:
        self.epoch = self.first_step = 0
        self._settings, self._num_samples = settings, num_samples
        self._steps = num_steps(num_samples, settings.batch_size)
        # With drop_last an epoch leaves out the end of its order, which is no end of the dataset: other samples each
        # time.
        self._length = length

    def __iter__(self) -> Iterator[Task]:
        settings, epoch = self._settings, self.epoch
        together = max(1, _PERMUTED_TOGETHER // settings.batch_size)
        for step in range(self.first_step, self._steps):
            offset = (step - self.first_step) % together * settings.batch_size
            if offset == 0:
                start = step * settings.batch_size
                order = torch.arange(start, min(start + together * settings.batch_size, self._num_samples))
                if settings.shuffle:
                    order = permute(order, num_samples=self._length, seed=settings.seed, epoch=epoch)
            for virtual_rank in settings.block:
                # The dealing of `share_positions`, on positions that have been permuted already.
                indices = order[offset : offset + settings.batch_size][virtual_rank :: settings.virtual_ranks].tolist()
                width = settings.micro_batch_size or max(len(indices), 1)
                for part, first in enumerate(range(0, len(indices), width)):
                    yield Task(epoch, step, virtual_rank, part, indices[first : first + width])

    def parts_of(self, step: int) -> Iterator[tuple[int, int]]:
        """Give each non-empty virtual rank of a step and the number of its micro-batches."""
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


def check_settings(settings: TrainerLoaderSettings) -> None:
    """Refuse settings that cannot be meant. Raises: ValueError."""
    if settings.batch_size < settings.virtual_ranks:
        raise ValueError(
            f"batch_size={settings.batch_size} is smaller than virtual_ranks={settings.virtual_ranks}: batch_size "
            "counts the samples of all ranks together, and each virtual rank needs at least one. Raise batch_size to "
            f"{settings.virtual_ranks} or more, or give Trainer fewer virtual_ranks."
        )
    if settings.micro_batch_size is not None and settings.micro_batch_size < 1:
        raise ValueError(f"micro_batch_size={settings.micro_batch_size} must be at least 1, or None for whole shares")
    if settings.workers < 0:
        raise ValueError(f"workers={settings.workers} must be 0 (read in the training process) or more")


def map_length(dataset: Any) -> int:
    """Count the samples of a map-style dataset.

    Raises: TypeError for something that is no map-style dataset, DataError for an empty one.
    """
    if isinstance(dataset, type):
        raise TypeError(f"the dataset is the class {dataset.__name__}, not called: give an object of it")
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(map(repr, list(dataset)[:4]))
        raise TypeError(f"the dataset is a {type(dataset).__name__} with the keys {keys}: give one of its values")
    if isinstance(dataset, (DataLoader, IterableDataset, str, bytes)) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"a {type(dataset).__name__} is no map-style dataset: give the dataset itself, with __len__ and "
            "__getitem__, or an IterableDataset; batches, order, workers and ranks are looked after here."
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{type(dataset).__name__} has no __len__: add it, or make the dataset an IterableDataset")
    length = len(dataset)
    if length == 0:
        raise DataError(f"the dataset ({type(dataset).__name__}) is empty: check its folder, split or filter")
    return length


def whole_batches(length: int, batch_size: int) -> int:
    """Count the samples of a dataset that make up whole batches. Raises: DataError if none do."""
    if length < batch_size:
        raise DataError(
            f"the dataset has {length} samples, fewer than batch_size={batch_size}, and drop_last=True "
            "leaves none. Lower batch_size, or leave drop_last out: the last batch may be smaller here."
        )
    return length - length % batch_size
