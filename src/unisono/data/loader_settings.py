"""Settings for dividing a dataset into batches and reading it, shared by the loaders of Trainers and of user loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from unisono.arguments import flag, whole
from unisono.plan import derive_key, derive_keys, permute
from unisono.state.random import set_generators
from unisono.text import a_type

__all__ = ["PERMUTED_TOGETHER", "Collate", "LoaderSettings"]

Collate = Callable[[list[Any]], Any]

PERMUTED_TOGETHER = 32768
"""Permuting few positions costs as much as permuting thousands, so those of several steps are permuted together.

So many take some 2 ms at once, and 1 MB as numbers of Python.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderSettings:
    """Settings for dividing a dataset into batches and reading it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is impossible.
    """

    batch_size: int
    """Samples of a global batch, over all ranks."""
    seed: int
    """Seed of the order and of the dataset's random numbers."""
    shuffle: bool
    """Use a new order in each epoch; otherwise the dataset's."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller than the others."""
    collate_fn: Collate | None = None
    """Makes a batch from a list of samples; None: torch's default_collate."""
    workers: int = 0
    """Number of processes of this rank that read ahead; 0 reads in the training process."""
    pin_memory: bool = False
    """Read into page-locked memory, for copies to a GPU."""
    stream: str = "train"
    """Name of the streams of random numbers, part of the key of each seed."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "seed", "workers"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("shuffle", "drop_last", "pin_memory"):
            flag(name, getattr(self, name))
        collate: Any = self.collate_fn
        if collate is not None and not callable(collate):
            raise TypeError(f"collate_fn is {a_type(collate)}; give a function of a list of samples")
        if self.workers < 0:
            raise ValueError(f"workers={self.workers} must be 0 (read in the training process) or more")

    def identity(self, num_samples: int | None) -> dict[str, Any]:
        """Return the settings that decide which samples are in which batch, except seed and division among ranks.

        Args:
            num_samples: Number of samples in an epoch; None if the dataset has no length.
        """
        return {
            "batch_size": self.batch_size,
            "num_samples": num_samples,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def set_generators(self, use: str, *coordinates: int) -> None:
        """Set all generators for one use, such as reading a sample, at its coordinates: epoch, sample, ..."""
        set_generators(self.key(use, *coordinates))

    def seeded(self, samples: Iterator[Any], use: str, *coordinates: int) -> Iterator[Any]:
        """Yield samples; set the random generators before each, for its position after the coordinates."""
        for position in count():
            self.set_generators(use, *coordinates, position)
            try:
                sample = next(samples)
            except StopIteration:
                return
            yield sample

    def key(self, use: str, *coordinates: int) -> int:
        """Return the key of one use, such as reading a sample, at its coordinates: epoch, sample, ..."""
        return derive_key(self.seed, f"{self.stream}/{use}", *coordinates)

    def keys(self, use: str, *coordinates: int, last: Iterable[int]) -> list[int]:
        """Return the keys of uses that differ in their last coordinate alone."""
        return derive_keys(self.seed, f"{self.stream}/{use}", *coordinates, last=last)

    def order(self, steps: Iterable[range], *, num_samples: int, epoch: int, width: int) -> Iterator[Tensor]:
        """Yield the samples at the positions of each step.

        Args:
            steps: The positions in the epoch of each step.
            num_samples: The number of samples of the dataset.
            epoch: The epoch whose order is used.
            width: The approximate number of positions per step.
        """
        remaining, together = iter(steps), max(1, PERMUTED_TOGETHER // width)
        while block := list(islice(remaining, together)):
            positions = torch.cat([torch.arange(each.start, each.stop, each.step, device="cpu") for each in block])
            samples = self._permuted(positions, num_samples=num_samples, epoch=epoch)
            yield from torch.split_with_sizes(samples, [len(each) for each in block])

    def samples_at(self, positions: range, *, num_samples: int, epoch: int) -> Tensor:
        """Return the samples at some positions of an epoch."""
        wanted = torch.arange(positions.start, positions.stop, positions.step, device="cpu")
        return self._permuted(wanted, num_samples=num_samples, epoch=epoch)

    def _permuted(self, positions: Tensor, *, num_samples: int, epoch: int) -> Tensor:
        return permute(positions, num_samples=num_samples, seed=self.seed, epoch=epoch) if self.shuffle else positions
