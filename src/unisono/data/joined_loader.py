"""Several map-style datasets in one step, such as labelled and unlabelled samples: micro-batches are dicts of theirs.

The first dataset leads: an epoch is one pass over it, and the size of a batch is the number of its samples. The others
go round: their passes go on from batch to batch and from epoch to epoch, in whole batches. So which samples a step has
follows by arithmetic from the step's place in the run. Start reading at `JoinedLoader.batches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from typing import Any

from unisono.arguments import whole
from unisono.data.batch import Batch, MicroBatch, Share
from unisono.data.dataset import map_length
from unisono.data.map_loader import MapLoader, StepSamples
from unisono.errors import DataError
from unisono.text import a_type

__all__ = ["JoinedLoader", "check_joined"]


def check_joined(datasets: Any, batch_sizes: Mapping[Any, Any], **others: Any) -> dict[str, int]:
    """Return the batch sizes of several datasets by name, in the order of the datasets.

    Args:
        datasets: The datasets by name.
        batch_sizes: The size of a global batch of each.
        others: Arguments that are for a single dataset, by name.

    Raises:
        TypeError: These are not datasets by name, or a number is not a whole number.
        ValueError: The names differ, a number is out of range, or another argument is given.
        DataError: A dataset is empty, or one that goes round is smaller than its batch.
    """
    if not isinstance(datasets, Mapping) or not datasets or not all(isinstance(name, str) for name in datasets):
        raise TypeError(
            f"batch_size is {a_type(batch_sizes)}, which is for several datasets by name, and dataset is "
            f'{a_type(datasets)}: give {{"a": dataset, "b": other}} with {{"a": 16, "b": 64}}, or a number'
        )
    if datasets.keys() != batch_sizes.keys():
        raise ValueError(
            f"the datasets are {', '.join(map(repr, datasets))}, and batch_size is given for "
            f"{', '.join(map(repr, batch_sizes)) or 'none'}: give one for each"
        )
    for argument, value in others.items():
        if value:
            raise ValueError(f"{argument}={value!r} is for a single dataset: leave it out with several in one step")
    sizes = {name: whole(f"batch_size[{name!r}]", batch_sizes[name], least=1) for name in datasets}
    for number, (name, dataset) in enumerate(datasets.items()):
        length = map_length(dataset)
        if number and length < sizes[name]:
            raise DataError(
                f"the dataset {name!r} has {length} samples, fewer than its batch_size={sizes[name]}, and each of its "
                f"batches is whole: lower its batch_size to {length}, or put it first, so that an epoch is one pass "
                "over it"
            )
    return sizes


class JoinedLoader:
    """This rank's part of every batch of several datasets.

    Args:
        loaders: The loaders of the datasets by name; the first one leads, and the others leave out smaller batches.
    """

    def __init__(self, loaders: Mapping[str, MapLoader]) -> None:
        self._loaders = loaders
        (self._name, self._leader), *followers = loaders.items()
        self._followers = dict(followers)
        self.num_samples: int = self._leader.num_samples
        """Number of samples of the first dataset in an epoch."""
        self.steps: int = self._leader.steps
        """Number of steps in an epoch."""

    @property
    def identity(self) -> dict[str, Any]:
        """Settings that decide which samples are in which batch; see `LoaderSettings.identity`."""
        sizes = {name: f"{each.settings.batch_size} of {each.length}" for name, each in self._followers.items()}
        others = ", ".join(f"{name} ({size})" for name, size in sizes.items())
        return {**self._leader.identity, "order": f"{self._name} with {others or 'nothing else'}"}

    def divided(self, block: range) -> JoinedLoader:
        """Return the loader of a rank with other virtual ranks."""
        return JoinedLoader({name: each.divided(block) for name, each in self._loaders.items()})

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of an epoch, starting at `first_step`."""
        first, left = epoch * self.steps + first_step, self.steps - first_step
        followers = {name: each.read(islice(_rounds(each, first), left)) for name, each in self._followers.items()}
        for batch in self._leader.batches(epoch=epoch, first_step=first_step):
            joined = {self._name: batch, **{name: next(each) for name, each in followers.items()}}
            yield replace(batch, shares=[self._share(share.virtual_rank, joined) for share in batch.shares])

    def _share(self, virtual_rank: int, joined: Mapping[str, Batch]) -> Share:
        own = {
            name: next(share for share in batch.shares if share.virtual_rank == virtual_rank).micro_batches[0]
            for name, batch in joined.items()
        }
        items = {name: micro_batch.items for name, micro_batch in own.items()}
        return Share(virtual_rank, [MicroBatch(items, own[self._name].indices)])


def _rounds(loader: MapLoader, first: int) -> Iterator[StepSamples]:
    """Yield the batches of all passes over a dataset, in order, starting at batch number `first`."""
    start, step = divmod(first, loader.steps)
    for number in count(start):
        yield from loader.order(number, step)
        step = 0
