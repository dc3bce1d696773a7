"""A sampler for anyone's own loop: torch's `DistributedSampler` without its start-up cost, repeats and lost place.

For a script that keeps its `DataLoader`; a script with a `Trainer` needs no sampler. The order of an epoch is
`plan.permute`, worked out a block at a time as indices are asked for, so that a rank holds kilobytes where torch's
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
from unisono.data.position import Position, find_rank, position_state, read_position
from unisono.errors import DataError
from unisono.plan.permutation import permute

__all__ = ["DistributedSampler"]

# Permuting few positions costs as much as permuting thousands; of these, 0.3 ms and 0.4 MB.
_BLOCK = 8192


@dataclass(slots=True)
class _Cursor:
    """How far one iteration over an epoch has come."""

    epoch: int
    start: int = 0
    """Position of the epoch at which all ranks start."""
    started: bool = False
    """Whether an iterator has taken it up; each serves one."""
    given: int = 0
    """Indices that this rank has handed out."""


class DistributedSampler(TorchDistributedSampler[int]):
    """Deal every sample of an epoch to exactly one rank, in an order that seed and epoch decide.

    A drop-in for `torch.utils.data.DistributedSampler`: the same arguments, attributes and `set_epoch`, and an instance
    of it, so that frameworks which look for one find it. What differs:

    - Nothing is repeated and nothing left out. Rank r has positions r, r + W, r + 2W, … of the epoch, so some ranks
      may have one sample more than others. A loop that communicates in every batch, as DistributedDataParallel does,
      **needs equal lengths**, or it hangs: give `drop_last=True` (leave out the last few samples), or `pad=True`
      (repeat the first few, as torch's class does), or train under `torch.distributed.algorithms.join.Join`. To
      evaluate, give neither.
    - No list is made: O(1) memory and a start in under a millisecond, for up to 2^62 samples.
    - The order is another than torch's, as shuffled; and seed 0 epoch 1 is another than seed 1 epoch 0.
    - Ranks come from torch.distributed if it is initialised, else from what the launcher left in the environment (RANK
      and WORLD_SIZE, or the variables of srun and mpirun), else there is one.
    - `state_dict` and `load_state_dict` resume in mid-epoch, on any number of ranks.

    Every rank makes one, with equal arguments. Call `set_epoch` before each epoch, or all have the same order.
    Args: dataset has `__len__`, which is read once; num_replicas and rank place this process; pad is described above.
    Raises: ValueError for a rank outside [0, num_replicas) or pad with drop_last, TypeError for a dataset without
        `__len__`, DataError if no sample is left.

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
        self._cursor = _Cursor(epoch=0)
        self.num_samples: int = self._share(0)
        """Indices of this rank in a whole epoch."""
        self.total_size: int = self.num_samples * num_replicas if pad or drop_last else length
        """Indices of all ranks in a whole epoch."""

    def __len__(self) -> int:
        """Count this rank's indices in a whole epoch, also while a resumed epoch has fewer left."""
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices of the epoch; once after `load_state_dict`, only those that are left.

        To iterate over one epoch again gives the same indices again.
        """
        # A loader may ask for iterators that it never uses (torch's does, twice with batch_size=None and workers), so
        # nothing happens before the first index is asked for.
        if self._cursor.started:
            self._cursor = _Cursor(self.epoch)
        cursor = self._cursor
        cursor.started = True
        for block in self._blocks(cursor):
            for index in block.tolist():
                cursor.given += 1
                yield index

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. To set the epoch that was just loaded keeps the place in it."""
        epoch = whole("epoch", epoch)
        if epoch != self._cursor.epoch:
            self._cursor = _Cursor(epoch)
        self.epoch = epoch

    def state_dict(self, *, consumed: int | None = None) -> dict[str, Any]:
        """Say where the epoch stands, in a form that any number of ranks can go on from.

        No communication: it takes for granted that all ranks have come equally far, as they have after a step of
        synchronous training. **Save that of rank 0**: where lengths differ it has the longest share, and a rank that
        has come to its end cannot know whether the others have.

        The sampler knows which indices it has handed out. They have all been trained on if nothing is read ahead: in a
        loop over the sampler, or over a DataLoader without workers. **A DataLoader with workers is ahead by**
        `num_workers * prefetch_factor` **batches**, and a resume would skip what lies in its queue; pass `consumed`.
        (torchdata's StatefulDataLoader asks as each batch is sent to a worker and keeps the answer until that batch is
        yielded, so it needs no help.)

            for number, batch in enumerate(loader, start=1):
                ...
                state = sampler.state_dict(consumed=number * batch_size)

        Args: consumed counts the samples that this rank has trained on since this iteration began, which for a resumed
            one is where it resumed; the last batch may be counted as a full one.
        Returns: plain integers and booleans: epoch, position (of the epoch, all ranks together; what lies before it is
            done), seed, num_samples (of the dataset), shuffle.
        Raises: ValueError if more is said to be consumed than was handed out.
        """
        cursor = self._cursor
        given, share = cursor.given, self._share(cursor.start)
        if consumed is not None:
            if consumed < 0 or given < min(consumed, share):
                raise ValueError(
                    f"consumed={consumed} is outside [0, {given}]: rank {self.rank} has handed out {given} indices in "
                    "this iteration. Count samples, not batches, of this rank alone, from the start of the iteration."
                )
            given = min(given, consumed)
        position = min(cursor.start + given * self.num_replicas, self._length)
        if self.drop_last and given == share:
            position = self._length  # the tail is done with, too
        return position_state(
            Position(cursor.epoch, position), seed=self.seed, num_samples=self._length, shuffle=self.shuffle
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let the next iteration go on from a saved place; the number of ranks may be another than when it was saved.

        Every rank must call it, with the same state. Sets the epoch. An epoch that was done has nothing left: the next
        iteration is empty, and the one after `set_epoch` is whole. pad and drop_last make what is left equal in length.
        Raises: ValueError if the state is not of this order of this dataset.
        """
        place = read_position(
            state_dict, seed=self.seed, num_samples=self._length, shuffle=self.shuffle, owner="sampler"
        )
        self.epoch = place.epoch
        self._cursor = _Cursor(place.epoch, start=place.position)

    def _share(self, start: int) -> int:
        """Count this rank's indices from a position of the epoch on."""
        left, ranks = self._length - start, self.num_replicas
        if self.drop_last:
            return left // ranks
        return -(-left // ranks) if self.pad else -(-max(0, left - self.rank) // ranks)

    def _blocks(self, cursor: _Cursor) -> Iterator[torch.Tensor]:
        count = self._share(cursor.start)
        for first in range(0, count, _BLOCK):
            # int64 on the CPU, whatever the default device is.
            turns = torch.arange(first, min(first + _BLOCK, count), device="cpu")
            # The remainder is for padding, which starts the epoch over.
            positions = (turns * self.num_replicas + (cursor.start + self.rank)) % self._length
            if self.shuffle:
                positions = permute(positions, num_samples=self._length, seed=self.seed, epoch=cursor.epoch)
            yield positions
