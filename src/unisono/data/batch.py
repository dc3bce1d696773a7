"""What travels from a loader to a step: the micro-batches of one global batch that belong to this rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

__all__ = ["Batch", "MicroBatch", "Share"]

_REMEDY = (
    "it holds this rank's shares of the global batch. Pass it to trainer.step(loss, batch), whose function gets the "
    "tensors as loss(model, micro_batch); batch.micro_batches yields them for looking at."
)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together."""

    items: Any
    """What collate_fn made of the samples."""
    indices: Sequence[int]
    """The samples' indices in the dataset; their positions in the stream for an iterable dataset."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one virtual rank has of a batch: one micro-batch, or several where gradients are accumulated."""

    virtual_rank: int
    """Which virtual rank, 0 <= virtual_rank < V."""
    micro_batches: Sequence[MicroBatch]
    """In the order in which they are computed; none is empty."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One global batch as this rank sees it: hand it to `Trainer.step`."""

    epoch: int
    """Epoch, from 0."""
    step: int
    """Step within the epoch, from 0."""
    size: int
    """Samples of the global batch, over all ranks; smaller in the last step if the dataset does not divide."""
    shares: Sequence[Share]
    """The non-empty shares of this rank's virtual ranks, in order."""

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> NoReturn:
        raise TypeError(f"a batch of unisono cannot be unpacked or looped over: {_REMEDY}")

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(f"a batch of unisono has no entry {key!r}: {_REMEDY}")

    @property
    def micro_batches(self) -> Iterator[Any]:
        """This rank's micro-batches, as collate_fn made them."""
        return (micro_batch.items for share in self.shares for micro_batch in share.micro_batches)
