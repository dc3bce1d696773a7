"""Checks of datasets, their lengths, and the samples of an iterable dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from unisono.data.loader_settings import LoaderSettings
from unisono.data.loader_workers import LoaderWorkers, warn_on_stderr
from unisono.errors import DataError
from unisono.text import a_type

__all__ = ["map_length", "read_ahead", "sampler_length", "stream_length", "stream_samples", "whole_batches"]


def map_length(dataset: Any) -> int:
    """Return the number of samples of a map-style dataset.

    Raises:
        TypeError: The object is not a map-style dataset.
        DataError: The dataset is empty.
    """
    if isinstance(dataset, type):
        raise TypeError(f"the dataset is the class {dataset.__name__}, not called: give an object of it")
    if isinstance(dataset, Mapping) and 0 not in dataset:
        keys = ", ".join(map(repr, list(dataset)[:4]))
        raise TypeError(
            f"the dataset is {a_type(dataset)} with the keys {keys}: give one of its values, or, to "
            'trainer.batches for several in one step, a batch_size for each, such as batch_size={"a": 16, "b": 64}'
        )
    if isinstance(dataset, (DataLoader, IterableDataset, str, bytes)) or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"{a_type(dataset)} is no map-style dataset: give the dataset itself, with __len__ and "
            "__getitem__, or an IterableDataset; batches, order, workers and ranks are looked after here."
        )
    if not hasattr(dataset, "__len__"):
        raise TypeError(f"{type(dataset).__name__} has no __len__: add it, or make the dataset an IterableDataset")
    return _positive_length(dataset)


def sampler_length(dataset: Any) -> int:
    """Return the number of samples of a dataset for a sampler, which needs nothing else of it.

    Raises:
        TypeError: The dataset has no length.
        DataError: The dataset is empty.
    """
    if not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no __len__, so its samples cannot be dealt by number: add __len__, or, as "
            "with an IterableDataset, use no sampler and cut it up by rank inside its __iter__."
        )
    return _positive_length(dataset)


def whole_batches(length: int, batch_size: int) -> int:
    """Return the number of samples of a dataset that make up whole batches.

    Raises:
        DataError: There is no whole batch.
    """
    if length < batch_size:
        raise DataError(
            f"the dataset has {length} samples, fewer than batch_size={batch_size}, and drop_last=True "
            "leaves none. Lower batch_size, or leave drop_last out: the last batch may be smaller here."
        )
    return length - length % batch_size


def stream_length(dataset: IterableDataset[Any], settings: LoaderSettings) -> int | None:
    """Return the number of samples of an iterable dataset; None if it has no length.

    Raises:
        ValueError: The settings ask for shuffling.
    """
    if settings.shuffle:
        raise ValueError(
            f"shuffle=True cannot be done for {type(dataset).__name__}: an iterable dataset has the order that it "
            "has. Shuffle inside it (random numbers there follow seed and epoch), and pass shuffle=False."
        )
    return len(dataset) if hasattr(dataset, "__len__") else None


def stream_samples(dataset: IterableDataset[Any], settings: LoaderSettings, *, epoch: int) -> Iterator[Any]:
    """Return an iterator over the samples of an iterable dataset, which sets the random generators before each."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
    settings.set_generators("stream", epoch)
    return settings.seeded(iter(dataset), "sample", epoch)


def read_ahead(
    stream: IterableDataset[Any], settings: LoaderSettings, *, tell: Callable[[str], None] = warn_on_stderr
) -> Iterator[Any]:
    """Return an iterator over the batches of a stream, which a worker process reads if the settings ask for workers.

    A second worker would read the whole stream once more, so there is at most one.
    """
    if not settings.workers:
        return iter(stream)
    return iter(LoaderWorkers(stream, tasks=None, number=1, pin_memory=settings.pin_memory, tell=tell))


def _positive_length(dataset: Any) -> int:
    length = len(dataset)
    if length == 0:
        raise DataError(f"the dataset ({type(dataset).__name__}) is empty: check its folder, split or filter")
    return int(length)
