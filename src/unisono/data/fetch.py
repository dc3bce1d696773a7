"""Reading micro-batches by sample indices, in this process or in a worker process, with the same random numbers.

The random numbers of a sample depend on (seed, epoch, sample), those of collate_fn on (seed, epoch, step, virtual rank,
part). Augmentation therefore does not depend on the worker or rank that performs it; see `data.sample_generators`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

from unisono.data.sample_generators import SampleGenerators
from unisono.data.settings import LoaderSettings

__all__ = ["Fetcher", "Part", "Task"]


class Part(NamedTuple):
    """The samples of one micro-batch."""

    virtual_rank: int
    number: int
    """Number of the micro-batch within its share."""
    indices: list[int]
    positions: range | None = None
    """Positions in the order of the epoch, to which random numbers then belong. None: they belong to the samples."""


class Task(NamedTuple):
    """The part of one step that a rank reads: none, one or several micro-batches."""

    epoch: int
    step: int
    size: int
    """Samples of the global batch."""
    parts: list[Part]

    @property
    def indices(self) -> list[int]:
        """The samples of all micro-batches, in order."""
        return [index for part in self.parts for index in part.indices]


class Fetcher(Dataset[Any]):
    """A dataset whose index is a `Task` and whose item is the list of its collated micro-batches.

    A `TensorDataset` (or a subset of one) is indexed as a whole rather than sample by sample. A dataset with
    `__getitems__` is asked for all samples of the micro-batch at once; its random numbers then belong to (seed, epoch,
    first sample of the micro-batch).
    """

    def __init__(self, dataset: Any, settings: LoaderSettings) -> None:
        self.dataset, self._settings = dataset, settings
        self._tensors, self._mapping = _whole_tensors(dataset) if settings.collate_fn is None else (None, None)
        self._reads_together = hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)
        self._generators: SampleGenerators | None = None

    def __getitem__(self, task: Task) -> list[Any]:
        """Return the results of collate_fn, one for each micro-batch."""
        if self._tensors is not None:
            return [self._rows(part.indices) for part in task.parts]
        generators = self._generators
        if generators is None:  # made in the process that reads
            generators = self._generators = SampleGenerators()
            return self._read_noting(task, generators)
        generators.settle(self._settings.key("step", task.epoch, task.step))
        try:
            found = self._read(task, generators.seed if generators.has_drawn else None)
        except Exception:  # the dataset drew from an unseeded generator: with its own numbers it may not fail
            if not generators.moved():
                raise
        else:
            if not generators.moved():
                return found
        return self._read_noting(task, generators)

    def _rows(self, indices: list[int]) -> list[Tensor]:
        assert self._tensors is not None
        rows = torch.tensor(indices)
        if self._mapping is not None:
            rows = self._mapping[rows]
        return [tensor[rows] for tensor in self._tensors]

    def _read_noting(self, task: Task, generators: SampleGenerators) -> list[Any]:
        """Read micro-batches with all generators seeded, and note which ones are drawn from."""
        found = self._read(task, generators.seed_all)
        generators.note_draws()
        return found

    def _read(self, task: Task, seed: Callable[[int], None] | None) -> list[Any]:
        """Read micro-batches; call `seed` with a key before each sample and before samples are collated."""
        dataset, key, keys = self.dataset, self._settings.key, self._settings.keys
        collate = self._settings.collate_fn or _collate
        found = []
        for part in task.parts:
            if self._reads_together:
                if seed is not None:
                    use, owners = _owners(part)
                    seed(key(f"{use}s", task.epoch, owners[0]))
                samples = dataset.__getitems__(part.indices)
            elif seed is None:
                samples = [dataset[index] for index in part.indices]
            else:
                samples = []
                use, owners = _owners(part)
                for index, each in zip(part.indices, keys(use, task.epoch, last=owners), strict=True):
                    seed(each)
                    samples.append(dataset[index])
            if seed is not None:
                seed(key("collate", task.epoch, task.step, part.virtual_rank, part.number))
            found.append(collate(samples))
        return found


def _owners(part: Part) -> tuple[str, Sequence[int]]:
    """Return what the random numbers of each sample belong to, and the name of their stream."""
    return ("sample", part.indices) if part.positions is None else ("position", part.positions)


def _collate(samples: list[Any]) -> Any:
    """Return what torch's default_collate returns, in less time for tuples of tensors.

    Like default_collate it goes by the first sample's types.
    """
    if type(samples[0]) is tuple and tuple not in default_collate_fn_map:
        try:
            columns = [*zip(*samples, strict=True)]
        except ValueError:
            return default_collate(samples)  # which raises its own error for unequal lengths
        return [_stack(column) for column in columns]
    return default_collate(samples)


def _stack(values: tuple[Any, ...]) -> Any:
    first = values[0]
    is_plain = type(first) is Tensor and first.layout is torch.strided and not first.is_nested
    if is_plain and default_collate_fn_map[Tensor] is collate_tensor_fn:
        return torch.stack(values)
    return default_collate(values)  # type: ignore[arg-type]


def _whole_tensors(dataset: Any) -> tuple[Sequence[Tensor] | None, Tensor | None]:
    """Return a TensorDataset's tensors, and the rows of them that a Subset selects (None: all); otherwise two None."""
    mapping: Tensor | None = None
    while type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices)
        mapping = indices if mapping is None else indices[mapping]
        dataset = dataset.dataset
    # A subclass may add augmentation: only the plain class is sure to be no more than its tensors.
    return (dataset.tensors, mapping) if type(dataset) is TensorDataset else (None, None)
