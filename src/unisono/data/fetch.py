"""Reading a micro-batch by sample indices, in this process or in a worker process, with the same random numbers.

Before a sample is read, all generators are set from (seed, epoch, sample); before samples are collated, from (seed,
epoch, step, virtual rank, part). So augmentation does not depend on the worker or rank that does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from unisono.data.settings import LoaderSettings

__all__ = ["Fetcher", "Task"]


class Task(NamedTuple):
    """One micro-batch to fetch."""

    epoch: int
    step: int
    virtual_rank: int
    part: int
    """Number of the micro-batch within its share."""
    indices: list[int]


class Fetcher(Dataset[Any]):
    """A dataset whose index is a `Task` and whose item is the collated micro-batch.

    A `TensorDataset` (or a subset of one) is indexed as a whole rather than sample by sample. A dataset with
    `__getitems__` is asked for all samples of the micro-batch at once; its random numbers then belong to (seed, epoch,
    first sample of the micro-batch).
    """

    def __init__(self, dataset: Any, settings: LoaderSettings) -> None:
        self.dataset, self._settings = dataset, settings
        self._tensors, self._mapping = _whole_tensors(dataset) if settings.collate_fn is None else (None, None)

    def __getitem__(self, task: Task) -> tuple[list[int], Any]:
        """Return one micro-batch: the samples' indices, and the result of collate_fn."""
        return task.indices, self._items(task)

    def _items(self, task: Task) -> Any:
        set_generators = self._settings.set_generators
        if self._tensors is not None:
            indices = torch.tensor(task.indices)
            if self._mapping is not None:
                indices = self._mapping[indices]
            return [tensor[indices] for tensor in self._tensors]
        if hasattr(self.dataset, "__getitems__") and not isinstance(self.dataset, Subset):
            set_generators("samples", task.epoch, task.indices[0])
            samples = self.dataset.__getitems__(task.indices)
        else:
            samples = []
            for index in task.indices:
                set_generators("sample", task.epoch, index)
                samples.append(self.dataset[index])
        set_generators("collate", task.epoch, task.step, task.virtual_rank, task.part)
        return (self._settings.collate_fn or default_collate)(samples)


def _whole_tensors(dataset: Any) -> tuple[Sequence[Tensor] | None, Tensor | None]:
    """Return a TensorDataset's tensors, and the rows of them that a Subset selects (None: all); otherwise two None."""
    mapping: Tensor | None = None
    while type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices)
        mapping = indices if mapping is None else indices[mapping]
        dataset = dataset.dataset
    # A subclass may add augmentation: only the plain class is sure to be no more than its tensors.
    return (dataset.tensors, mapping) if type(dataset) is TensorDataset else (None, None)
