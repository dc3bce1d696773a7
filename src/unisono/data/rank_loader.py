"""`loader`: a dataset as this rank's batches, for a training loop of one's own.

It takes the place of DataLoader, DistributedSampler and set_epoch. Which positions of the epoch belong to a step is
`plan.even_range`; rank r of W reads those of them that are r modulo W, as DistributedSampler deals. Reading a map-style
dataset is here, an iterable one in `data.rank_stream_source`. A Trainer needs neither: it has loaders of its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from unisono.arguments import whole
from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import group_of
from unisono.data.position import Position, check_same_data, find_rank, position_state, read_position
from unisono.data.rank_batch import RankBatch, RankLoaderSettings
from unisono.data.rank_map_source import MapSource
from unisono.data.rank_stream_source import StreamSource
from unisono.data.settings import Collate
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
    """Make the loader of this rank's batches. Every rank makes one, of the same whole dataset.

        batches = unisono.data.loader(dataset, batch_size=64)
        for epoch in range(10):
            for images, labels in batches:
                ...

    If ranks have met (`unisono.init`), they compare what they were given: one small collective. Make it after that, or
    a rank that no launcher started takes itself for the only one.
    Args:
        dataset: map-style or iterable; a list is fine. An iterable one must yield the same samples on every rank.
        batch_size: samples of all ranks together; each rank's batch is a W-th of it, give or take one sample.
        shuffle: a new order every epoch, from seed and epoch; None means yes, and no for an iterable dataset.
        seed: root of the order, and of the random numbers that the dataset draws.
        workers: processes of each rank that read ahead; 0 reads in this one. The batches are the same.
        drop_last: leave out the last batch of an epoch if it is smaller than the others.
        collate_fn: makes a batch of a list of samples; None: torch's default_collate.
        pin_memory: read into page-locked memory, for copies to a GPU.
        group: the ranks that share the dataset; None: all ranks of the job.
        rank, world_size: stand for other places than that of this process; nothing is compared then.
    Raises: ValueError for a wrong number, TypeError for something that is no dataset, DataError for an empty one,
        RankMismatchError on all ranks if they were given different things, PeerError if another rank raises one of the
        others, GroupError for a group that this rank is not in.
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
    check_same_data(everyone)
    return made


class RankLoader:
    """This rank's batches of a dataset; each iteration over it is an epoch. Made by `loader`.

    An iteration from which only one batch was taken was a look at the data: the next one begins with the same epoch.
    """

    def __init__(self, dataset: Any, settings: RankLoaderSettings) -> None:
        self._settings = settings
        stream = isinstance(dataset, IterableDataset)
        self._source: MapSource | StreamSource = (StreamSource if stream else MapSource)(dataset, settings)
        self._next = self._at = Position(0, 0)
        self._running: object = None
        self.epoch: int = 0
        """The epoch that is being iterated over, else the next one."""
        self.size: int = 0
        """Samples of the last global batch, over all ranks."""
        self.indices: list[int] = []
        """The samples of this rank's last batch: their indices in the dataset, or their positions in a stream."""
        self.weight: float = 1.0
        """How much this rank's last batch counts: its share of the samples times the number of ranks.

        With a loss that is the mean over this rank's batch, the average over ranks of loss · weight, and of its
        gradient, is that of the global batch, also where ranks have unequal shares. 1.0 where shares are equal.
        """

    @property
    def batch_size(self) -> int:
        """Samples of a global batch, over all ranks."""
        return self._settings.batch_size

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same on all ranks, by name."""
        return {**self._settings.identity(self.num_samples), "seed": self._settings.seed}

    @property
    def num_samples(self) -> int | None:
        """Samples of the dataset, over all ranks; None for an iterable dataset that does not say."""
        return self._source.num_samples

    def __len__(self) -> int:
        """Count the steps of a whole epoch, which are the same on all ranks.

        Raises: TypeError for an iterable dataset without `__len__`.
        """
        if self._source.num_samples is None:
            raise TypeError(
                "the iterable dataset has no __len__, so the steps of an epoch are not known before its end"
            )
        return self._settings.steps(self._source.num_samples)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the next epoch; once after `load_state_dict`, those that are left.

        Every rank must take as many. Raises: DataError for a stream that yields nothing, and from an iterator that is
        used after a newer one of the same loader has begun.
        """
        me = self._running = object()
        start = self._next
        self.epoch, self._at = start.epoch, start
        batches = self._source.batches(start)
        while True:
            # What the dataset draws must not disturb what the loop draws, for dropout for instance.
            with kept_generators():
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
            self._next = Position(start.epoch + 1, 0)
        self._next = self._at = Position(start.epoch + 1, 0)
        self.epoch = start.epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. Rarely needed: it counts by itself.

        To set the epoch that was just loaded keeps the place in it.
        """
        epoch = whole("epoch", epoch)
        if epoch != self._next.epoch:
            self._next = self._at = Position(epoch, 0)
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Say what is done: all batches up to the one that was yielded last. The same on all ranks: save one.

        Right with workers, too, which read ahead. No communication.
        Returns: plain integers and booleans, in the form of `DistributedSampler`'s.
        """
        settings = self._settings
        return position_state(self._at, seed=settings.seed, num_samples=self.num_samples, shuffle=settings.shuffle)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a saved place, on any number of ranks. Every rank must call it.

        `epoch` is then the epoch to go on with. Batches are counted from the saved place on.
        Raises: ValueError if the state is not of this order of this dataset.
        """
        settings = self._settings
        start = read_position(
            state_dict, seed=settings.seed, num_samples=self.num_samples, shuffle=settings.shuffle, owner="loader"
        )
        if self.num_samples is not None and not settings.steps(self.num_samples, start=start.position):
            start = Position(start.epoch + 1, 0)
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
        self._at = Position(epoch + 1, 0) if batch.last else Position(epoch, batch.positions.stop)
        self.size, self.indices = size, batch.indices
        self.weight = 0.0 if batch.borrowed else len(batch.indices) * settings.ranks / size
