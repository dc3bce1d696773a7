"""Reading micro-batches by sample indices, in this process or in a worker process, with the same random numbers.

The random numbers of a sample depend on (seed, epoch, sample), those of collate_fn on (seed, epoch, step, virtual rank,
part). Augmentation therefore does not depend on the worker or rank that performs it; see `data.sample_generators`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from unisono.data.columns import Columns, collate_columns, collates_as_torch
from unisono.data.loader_settings import LoaderSettings
from unisono.data.sample_generators import SampleGenerators

__all__ = ["Fetcher", "NoteSamples", "Part", "Task"]

NoteSamples = Callable[[Sequence[int]], None]
"""Called with the indices of samples that are about to be read."""

_MOST_MISSES = 8
"""Steps in a row whose samples cannot be collated together, after which that is not tried any more."""


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
        self.dataset, self.settings = dataset, settings
        self._tensors, self._mapping = _whole_tensors(dataset) if settings.collate_fn is None else (None, None)
        self._reads_together = hasattr(dataset, "__getitems__") and not isinstance(dataset, Subset)
        self._generators: SampleGenerators | None = None
        self._misses = 0
        self._note: NoteSamples | None = None

    def __getitem__(self, task: Task) -> list[Any]:
        """Return the results of collate_fn, one for each micro-batch."""
        found = self.read(task)
        return found.parts() if isinstance(found, Columns) else found

    def read(self, task: Task, *, share: bool = False, note: NoteSamples | None = None) -> list[Any] | Columns:
        """Return the results of collate_fn for each micro-batch, or together.

        Args:
            task: What to read.
            share: Put tensors into shared memory where that saves a copy.
            note: Called before samples are read. None: samples are read a little faster.
        """
        self._note = note
        if self._tensors is not None:
            return [self._rows(part.indices) for part in task.parts]
        generators = self._generators
        if generators is None:  # made in the process that reads
            generators = self._generators = SampleGenerators()
            return self._read_noting(task, generators, share)
        generators.settle(self.settings.key("step", task.epoch, task.step))
        try:
            found = self._read(task, generators.seed if generators.has_drawn else None, share)
        except Exception:  # the dataset drew from an unseeded generator: with its own numbers it may not fail
            if not generators.moved():
                raise
        else:
            if not generators.moved():
                return found
        return self._read_noting(task, generators, share)

    def _rows(self, indices: list[int]) -> list[Tensor]:
        assert self._tensors is not None
        rows = torch.frombuffer(array("q", indices), dtype=torch.int64)  # in a quarter of the time of torch.tensor
        if self._mapping is not None:
            rows = self._mapping[rows]
        return [tensor[rows] for tensor in self._tensors]

    def _read_noting(self, task: Task, generators: SampleGenerators, share: bool) -> list[Any] | Columns:
        """Read micro-batches with all generators seeded, and note which ones are drawn from."""
        found = self._read(task, generators.seed_all, share)
        generators.note_draws()
        return found

    def _read(self, task: Task, seed: Callable[[int], None] | None, share: bool) -> list[Any] | Columns:
        """Read micro-batches; call `seed` with a key before each sample and before samples are collated."""
        if self.settings.collate_fn is None and self._misses < _MOST_MISSES and task.parts and collates_as_torch():
            return self._read_together(task, seed, share)
        collate = self.settings.collate_fn or _collate
        found = []
        for part in task.parts:
            samples = self._samples(part, task.epoch, seed)
            self._seed_collating(task, part, seed)
            found.append(collate(samples))
        return found

    def _read_together(self, task: Task, seed: Callable[[int], None] | None, share: bool) -> list[Any] | Columns:
        """Read micro-batches and collate them together, which draws no numbers; if that cannot be, one by one."""
        if self._reads_together:
            each = [self._samples(part, task.epoch, seed) for part in task.parts]
            samples, sizes = [*chain.from_iterable(each)], [len(own) for own in each]
        else:
            samples = self._read_each(task.parts, task.epoch, seed)
            sizes = [len(part.indices) for part in task.parts]
        columns = collate_columns(samples, sizes, share=share)
        if columns is not None:
            self._misses = 0
            return columns
        self._misses += 1
        found, remaining = [], iter(samples)
        for part, size in zip(task.parts, sizes, strict=True):
            self._seed_collating(task, part, seed)
            found.append(_collate([*islice(remaining, size)]))
        return found

    def _samples(self, part: Part, epoch: int, seed: Callable[[int], None] | None) -> list[Any]:
        """Return the samples of a micro-batch; call `seed` before each, or before all that are read together."""
        if not self._reads_together:
            return self._read_each([part], epoch, seed)
        if self._note is not None:
            self._note(part.indices)
        if seed is not None:
            use, owners = _owners(part)
            seed(self.settings.key(f"{use}s", epoch, owners[0]))
        return self.dataset.__getitems__(part.indices)  # type: ignore[no-any-return]

    def _read_each(self, parts: Sequence[Part], epoch: int, seed: Callable[[int], None] | None) -> list[Any]:
        """Return the samples of some micro-batches, in order; call `seed` before each sample."""
        dataset = self.dataset
        indices = [*chain.from_iterable([part.indices for part in parts])]
        if seed is None:
            if self._note is not None:
                return [self._read_noted(index) for index in indices]
            return [dataset[index] for index in indices]
        samples: list[Any] = []
        use, append = _owners(parts[0])[0], samples.append
        owned = chain.from_iterable([_owners(part)[1] for part in parts])
        keys = self.settings.keys(use, epoch, last=owned)
        if self._note is None:
            for index, key in zip(indices, keys, strict=True):
                seed(key)
                append(dataset[index])
            return samples
        for index, key in zip(indices, keys, strict=True):
            seed(key)
            append(self._read_noted(index))
        return samples

    def _read_noted(self, index: int) -> Any:
        assert self._note is not None
        self._note([index])
        return self.dataset[index]

    def _seed_collating(self, task: Task, part: Part, seed: Callable[[int], None] | None) -> None:
        if seed is not None:
            seed(self.settings.key("collate", task.epoch, task.step, part.virtual_rank, part.number))


def _owners(part: Part) -> tuple[str, Sequence[int]]:
    """Return what the random numbers of each sample belong to, and the name of their stream."""
    return ("sample", part.indices) if part.positions is None else ("position", part.positions)


def _collate(samples: list[Any]) -> Any:
    """Make a micro-batch as torch does.

    Raises:
        TypeError, RuntimeError: As torch's, with what to do about it.
    """
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError) as error:
        if "default_collate" in str(error) or "stack expects each tensor" in str(error):
            advice = "pass batches(..., collate_fn=function), which makes a batch of a list of samples."
            raise type(error)(f"{error}: {advice}") from None
        raise


def _whole_tensors(dataset: Any) -> tuple[Sequence[Tensor] | None, Tensor | None]:
    """Return a TensorDataset's tensors, and the rows of them that a Subset selects (None: all); otherwise two None."""
    mapping: Tensor | None = None
    while type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices)
        mapping = indices if mapping is None else indices[mapping]
        dataset = dataset.dataset
    # A subclass may add augmentation: only the plain class is sure to be no more than its tensors.
    return (dataset.tensors, mapping) if type(dataset) is TensorDataset else (None, None)
