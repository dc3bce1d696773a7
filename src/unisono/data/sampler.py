"""A sampler for your own loop: torch's `DistributedSampler` without its start-up cost and repeats, and with resuming.

For a script that keeps its `DataLoader`; a script with a `Trainer` needs no sampler. The order of an epoch is
`plan.permute`, computed a block at a time as indices are requested, so that a rank holds kilobytes where torch's
class holds a list of the whole dataset. Start reading at `DistributedSampler`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as TorchDistributedSampler

from unisono.arguments import whole
from unisono.data.dataset import sampler_length
from unisono.data.reading_ranks import find_rank
from unisono.data.resume_point import ResumePoint, read_resume_point, resume_point_state
from unisono.errors import DataError
from unisono.plan.permutation import permute

__all__ = ["DistributedSampler"]

# Permuting few positions costs as much as permuting thousands; permuting this many takes 0.3 ms and 0.4 MB.
_BLOCK = 8192


@dataclass(slots=True)
class _IterationCursor:
    """The progress of one iteration over an epoch."""

    epoch: int
    start: int = 0
    """Position in the epoch at which all ranks start."""
    started: bool = False
    """True if an iterator uses it; each serves one iterator."""
    given: int = 0
    """Number of indices that this rank has yielded."""


class DistributedSampler(TorchDistributedSampler[int]):
    """Assigns every sample of an epoch to exactly one rank, in an order that seed and epoch determine.

    A drop-in replacement for `torch.utils.data.DistributedSampler`, with the same arguments, attributes and
    `set_epoch`. It is a subclass, so frameworks that look for torch's class find it. Differences:

    - No sample is repeated or left out. Rank r has positions r, r + W, r + 2W, … of the epoch, so some ranks may have
      one sample more than others. A loop that communicates in every batch, as DistributedDataParallel does, **needs
      equal lengths**, or it hangs: pass `drop_last=True` (leave out the last few samples) or `pad=True` (repeat the
      first few, as torch's class does), or train under `torch.distributed.algorithms.join.Join`. For evaluation, pass
      neither.
    - There is no list: O(1) memory and a start in under a millisecond, for up to 2^62 samples.
    - The shuffled order differs from torch's, and that of seed 0, epoch 1 from that of seed 1, epoch 0.
    - Ranks come from torch.distributed if it is initialised, otherwise from the launcher's environment variables (RANK
      and WORLD_SIZE, or those of srun and mpirun), otherwise there is one.
    - `state_dict` and `load_state_dict` resume in mid-epoch, on any number of ranks.

    Every rank makes one, with equal arguments; there is no communication. Call `set_epoch` before each epoch; otherwise
    all epochs have the same order.

    Args:
        dataset: An object with `__len__`, which is called once.
        num_replicas: The number of ranks. None: see above.
        rank: The rank of this process. None: see above.
        shuffle: Use a new order in each epoch; otherwise the dataset's.
        seed: Seed of the order.
        drop_last: Leave out the last samples of the order that do not divide among the ranks.
        pad: Repeat the first samples of the order so that they divide among the ranks.

    Raises:
        ValueError: `rank` is outside [0, num_replicas), or `pad` and `drop_last` are both set.
        TypeError: The dataset has no `__len__`, or an argument is not a whole number.
        DataError: The dataset is empty, or `drop_last` leaves no sample.

    >>> [list(DistributedSampler(range(8), num_replicas=3, rank=rank, shuffle=False)) for rank in range(3)]
    [[0, 3, 6], [1, 4, 7], [2, 5]]
    """

    def __init__(  # noqa: PLR0917 - the signature of torch's class
        self,
        dataset: Dataset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        pad: bool = False,
    ) -> None:
        rank, num_replicas = find_rank(rank, num_replicas, name="num_replicas")
        seed = whole("seed", seed)
        length = sampler_length(dataset)
        if pad and drop_last:
            raise ValueError(
                "pad=True and drop_last=True are two ways to the same length on all ranks: give one of them"
            )
        if drop_last and length < num_replicas:
            raise DataError(
                f"the dataset has {length} samples, fewer than num_replicas={num_replicas}, and drop_last=True leaves "
                f"none. Use at most {length} ranks, or pad=True instead."
            )
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.pad = pad
        self._length = length
        self._cursor = _IterationCursor(epoch=0)
        self.num_samples: int = self._share(0)
        """Number of indices of this rank in a whole epoch."""
        self.total_size: int = self.num_samples * num_replicas if pad or drop_last else length
        """Number of indices of all ranks in a whole epoch."""

    def __len__(self) -> int:
        """Return the number of this rank's indices in a whole epoch, also while a resumed epoch has fewer left."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices of the epoch; the first time after `load_state_dict`, only the remaining ones.

        Iterating over an epoch again yields the same indices again.
        """
        # A loader may create iterators that it never uses (torch's does, twice with batch_size=None and workers), so
        # nothing happens before the first index is requested.
        if self._cursor.started:
            self._cursor = _IterationCursor(self.epoch)
        cursor = self._cursor
        cursor.started = True
        for block in self._blocks(cursor):
            for index in block.tolist():
                cursor.given += 1
                yield index

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Setting the epoch that was just loaded keeps the place in it.

        Raises:
            TypeError: The epoch is not a whole number.
        """
        epoch = whole("epoch", epoch)
        if epoch != self._cursor.epoch:
            self._cursor = _IterationCursor(epoch)
        self.epoch = epoch

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Return the place in the epoch, in a form from which any number of ranks can resume.

        No communication: it assumes that all ranks have made the same progress, as they have after a step of
        synchronous training. **Save that of rank 0**: if lengths differ it has the longest share, and a rank at the end
        of its share cannot know whether the others are.

        The sampler counts the indices that it has yielded. They have all been trained on if nothing is read ahead: in a
        loop over the sampler, or over a DataLoader without workers. **A DataLoader with workers is ahead by**
        `num_workers * prefetch_factor` **batches**, and a resume would skip the batches in its queue; pass `consumed`.
        (torchdata's StatefulDataLoader calls this as each batch is sent to a worker and keeps the state until that
        batch is yielded, so it does not need `consumed`.)

            for number, batch in enumerate(loader, start=1):
                ...
                state = sampler.state_dict(consumed=number * batch_size)

        Args:
            consumed: The number of samples that this rank has trained on since this iteration began (a resumed one
                begins where it resumed); the last batch may be counted as a full one. None: all that were yielded.

        Returns:
            Plain integers and booleans: epoch, position (in the epoch, over all ranks; the samples before it are done),
            seed, num_samples (of the dataset), shuffle.

        Raises:
            TypeError: `consumed` is not a whole number.
            ValueError: `consumed` is more than was yielded, or negative.
        """
        cursor = self._cursor
        given, share = cursor.given, self._share(cursor.start)
        if consumed is not None:
            consumed = whole("consumed", consumed)
            if consumed < 0 or given < min(consumed, share):
                raise ValueError(
                    f"consumed={consumed} is outside [0, {given}]: rank {self.rank} has handed out {given} indices in "
                    "this iteration. Count samples, not batches, of this rank alone, from the start of the iteration."
                )
            given = min(given, consumed)
        position = min(cursor.start + given * self.num_replicas, self._length)
        if self.drop_last and given == share:
            position = self._length  # the tail is left out
        return resume_point_state(
            ResumePoint(cursor.epoch, position), seed=self.seed, num_samples=self._length, shuffle=self.shuffle
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume the next iteration at a saved place, on any number of ranks.

        Every rank must call it, with the same state. It sets the epoch. A finished epoch has nothing left: the next
        iteration is empty, and the one after `set_epoch` is whole. With `pad` or `drop_last`, all ranks have the same
        number of indices left.

        Raises:
            ValueError: The state is damaged, or is of a different dataset or order.
            TypeError: The epoch or position in the state is not a whole number.
        """
        point = read_resume_point(
            state_dict, seed=self.seed, num_samples=self._length, shuffle=self.shuffle, owner="sampler"
        )
        self.epoch = point.epoch
        self._cursor = _IterationCursor(point.epoch, start=point.position)

    def _share(self, start: int) -> int:
        """Return the number of this rank's indices from a position of the epoch on."""
        left, ranks = self._length - start, self.num_replicas
        if self.drop_last:
            return left // ranks
        return -(-left // ranks) if self.pad else -(-max(0, left - self.rank) // ranks)

    def _blocks(self, cursor: _IterationCursor) -> Iterator[torch.Tensor]:
        count = self._share(cursor.start)
        for first in range(0, count, _BLOCK):
            # int64 on the CPU, whatever the default device is.
            turns = torch.arange(first, min(first + _BLOCK, count), device="cpu")
            # The modulo is for padding, which repeats the epoch from its start.
            positions = (turns * self.num_replicas + (cursor.start + self.rank)) % self._length
            if self.shuffle:
                positions = permute(positions, num_samples=self._length, seed=self.seed, epoch=cursor.epoch)
            yield positions
