"""`loader`: a dataset as this rank's batches, for your own training loop.

It replaces DataLoader, DistributedSampler and set_epoch. `plan.even_range` determines the positions of a step; rank r
of W reads the positions that are r modulo W, as with DistributedSampler. `data.rank_map_source` reads a map-style
dataset, `data.rank_stream_source` an iterable one. A Trainer has separate loaders and needs none of this.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from unisono.activity import TimedWait, loaded
from unisono.arguments import whole
from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import group_of
from unisono.data.loader_settings import Collate
from unisono.data.rank_batch import RankBatch, RankLoaderSettings
from unisono.data.rank_map_source import MapSource
from unisono.data.rank_stream_source import StreamSource
from unisono.data.reading_ranks import check_data_of_ranks, find_rank
from unisono.data.resume_point import ResumePoint, read_resume_point, resume_point_state
from unisono.errors import DataError
from unisono.job.current import require_group
from unisono.state.random import kept_generators

__all__ = ["RankLoader", "loader"]


def loader(
    dataset: Dataset[Any] | Sequence[Any],
    batch_size: int,
    *,
    shuffle: bool | None = None,
    seed: int = 0,
    workers: int = 0,
    drop_last: bool = False,
    collate_fn: Collate | None = None,
    pin_memory: bool = False,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> RankLoader:
    """Return a loader of this rank's batches. Every rank must call it, with the same whole dataset.

        batches = unisono.data.loader(dataset, batch_size=64)
        for epoch in range(10):
            for images, labels in batches:
                ...

    If ranks have met (`unisono.init`), they compare their arguments in one small collective. Call it after `init`:
    otherwise a rank without a launcher assumes that it is the only one.

    Args:
        dataset: Map-style or iterable; a list is fine. An iterable one must yield the same samples on every rank.
        batch_size: Samples per batch over all W ranks; each rank's batch is a W-th of it, give or take one sample.
        shuffle: Use a new order in each epoch, from seed and epoch. None: True, but False for an iterable dataset.
        seed: Seed of the order, and of the random numbers that the dataset draws.
        workers: Processes of each rank that read ahead; 0 reads in this process. The batches are the same.
        drop_last: Leave out the last batch of an epoch if it is smaller than the others.
        collate_fn: Makes a batch from a list of samples; None: torch's default_collate.
        pin_memory: Read into page-locked memory, for copies to a GPU.
        group: The ranks that share the dataset; None: all ranks of the job.
        rank: Read the batches of this rank instead of this process's; ranks then compare nothing.
        world_size: Divide among this number of ranks; ranks then compare nothing.

    Raises:
        ValueError: A number is impossible, or shuffle=True is passed for an iterable dataset.
        TypeError: The dataset is neither map-style nor iterable, or an argument has the wrong type.
        DataError: The dataset is empty, or drop_last=True leaves no batch.
        RankMismatchError: Ranks passed different datasets or settings; raised on all ranks.
        PeerError: Another rank raised one of the first three errors.
        GroupError: This rank is not in the group, the group has ended, or a loss function is running.
    """
    overridden = rank is not None or world_size is not None
    own_rank, ranks = find_rank(rank, world_size, group=None if group is None else require_group(group))
    iterable = isinstance(dataset, IterableDataset)

    def make() -> RankLoader:
        settings = RankLoaderSettings(
            batch_size=batch_size,
            rank=own_rank,
            ranks=ranks,
            seed=seed,
            shuffle=not iterable if shuffle is None else shuffle,
            workers=workers,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
        )
        return RankLoader(dataset, settings)

    if overridden or ranks == 1 or not (dist.is_available() and dist.is_initialized()):
        return make()
    made, everyone = construct_on_all(
        group_of(group),
        "unisono.data.loader",
        make,
        lambda each: each.identity,
        errors=(DataError, TypeError, ValueError),
    )
    check_data_of_ranks(everyone)
    return made


class RankLoader:
    """An iterable over this rank's batches of a dataset; each iteration is an epoch. `loader` makes it.

    An iteration that is left after its first batch counts as a look at the data: the next one begins the same epoch.
    """

    def __init__(self, dataset: Any, settings: RankLoaderSettings) -> None:
        self._settings = settings
        stream = isinstance(dataset, IterableDataset)
        self._source: MapSource | StreamSource = (StreamSource if stream else MapSource)(dataset, settings)
        self._next = self._at = ResumePoint(0, 0)
        self._running: object = None
        self.epoch: int = 0
        """The epoch of the current iteration; between iterations, the next one."""
        self.size: int = 0
        """Samples of the last global batch, over all ranks."""
        self.indices: list[int] = []
        """The samples of this rank's last batch: their indices in the dataset, or their positions in a stream."""
        self.weight: float = 1.0
        """Weight of this rank's last batch: its share of the samples times the number of ranks.

        With a loss that is the mean over this rank's batch, the average over ranks of loss · weight, and of its
        gradient, is that of the global batch, also if ranks have unequal shares. 1.0 if shares are equal.
        """

    @property
    def batch_size(self) -> int:
        """Samples of a global batch, over all ranks."""
        return self._settings.batch_size

    @property
    def rank(self) -> int:
        """The rank whose batches these are, within the loader's group."""
        return self._settings.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that share each batch."""
        return self._settings.ranks

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that must be the same on all ranks, by name."""
        return {**self._settings.identity(self.num_samples), "seed": self._settings.seed}

    @property
    def num_samples(self) -> int | None:
        """Number of samples of the dataset, over all ranks; None for an iterable dataset without `__len__`."""
        return self._source.num_samples

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch, which is the same on all ranks.

        Raises:
            TypeError: The dataset is iterable and has no `__len__`.
        """
        if self._source.num_samples is None:
            raise TypeError(
                "the iterable dataset has no __len__, so the steps of an epoch are not known before its end"
            )
        return self._settings.steps(self._source.num_samples)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the next epoch; the first time after `load_state_dict`, the remaining ones.

        Every rank must take the same number of batches.

        Raises:
            DataError: A stream yields no batch, a worker process has died, or a newer iteration over this loader has
                begun.
        """
        me = self._running = object()
        start = self._next
        self.epoch, self._at = start.epoch, start
        batches = self._source.batches(start)
        while True:
            # The dataset's random numbers must not change those of the loop, for dropout for instance.
            with kept_generators(), TimedWait(loaded) if loaded.is_on else nullcontext():
                batch = next(batches, None)
            if batch is None:
                break
            self._note(start.epoch, batch)
            yield batch.items
            if self._running is not me:
                raise DataError(
                    "a newer iteration over this loader has begun, so this one cannot go on: the workers and the "
                    "place in the epoch belong to one iteration at a time. Make a second loader."
                )
            self._next = ResumePoint(start.epoch + 1, 0)
        self._next = self._at = ResumePoint(start.epoch + 1, 0)
        self.epoch = start.epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Rarely needed: epochs are counted automatically.

        Setting the epoch that was just loaded keeps the place in it.

        Raises:
            TypeError: The epoch is not a whole number.
        """
        epoch = whole("epoch", epoch)
        if epoch != self._next.epoch:
            self._next = self._at = ResumePoint(epoch, 0)
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the epoch after the batch that was yielded last. It is the same on all ranks: save one.

        Correct with workers too, although they read ahead. No communication. The state has plain integers and booleans
        in the format of `DistributedSampler.state_dict`.
        """
        settings = self._settings
        return resume_point_state(self._at, seed=settings.seed, num_samples=self.num_samples, shuffle=settings.shuffle)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume the next iteration at a saved place, on any number of ranks. Every rank must call it.

        `epoch` is then the epoch that continues. Batches are divided anew from the saved place on.

        Raises:
            ValueError: The state is damaged, or is of a different dataset or order.
            TypeError: The epoch or position in the state is not a whole number.
        """
        settings = self._settings
        start = read_resume_point(
            state_dict, seed=settings.seed, num_samples=self.num_samples, shuffle=settings.shuffle, owner="loader"
        )
        if self.num_samples is not None and not settings.steps(self.num_samples, start=start.position):
            start = ResumePoint(start.epoch + 1, 0)
        self._next = self._at = start
        self._running = None
        self.epoch = start.epoch

    def _note(self, epoch: int, batch: RankBatch) -> None:
        settings = self._settings
        size = len(batch.positions)
        if batch.borrowed:
            warnings.warn(
                f"rank {settings.rank} has no sample of the last batch of epoch {epoch}, which has {size} for "
                f"{settings.ranks} ranks: it gets one of another rank's, and the loader's weight is 0. Use fewer ranks,"
                " or multiply the loss by the weight and count the batch in metrics only if that is not 0.",
                stacklevel=3,
            )
        self._at = ResumePoint(epoch + 1, 0) if batch.last else ResumePoint(epoch, batch.positions.stop)
        self.size, self.indices = size, batch.indices
        self.weight = 0.0 if batch.borrowed else len(batch.indices) * settings.ranks / size
