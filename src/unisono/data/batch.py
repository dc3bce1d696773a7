"""The batch that a loader passes to a step: the micro-batches of one global batch that belong to this rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

__all__ = ["Batch", "MicroBatch", "Share"]

_REMEDY = (
    "it holds this rank's shares of the global batch. Pass it to trainer.step(loss_fn, batch), whose function gets the "
    "tensors as loss_fn(model, micro_batch); batch.micro_batches yields them for looking at."
)


class MicroBatch(NamedTuple):
    """Samples that go through the model together."""

    items: Any
    """The result of collate_fn for the samples."""
    indices: Sequence[int]
    """The samples' indices in the dataset; their positions in the stream for an iterable dataset."""


class Share(NamedTuple):
    """The part of a batch that belongs to one virtual rank: one micro-batch, or several with gradient accumulation."""

    virtual_rank: int
    """The virtual rank, 0 <= virtual_rank < V."""
    micro_batches: list[MicroBatch]
    """In the order in which they are computed; none is empty."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One global batch as this rank sees it, for `Trainer.step`."""

    epoch: int
    """Epoch, from 0."""
    step: int
    """Step within the epoch, from 0."""
    size: int
    """Samples of the global batch, over all ranks; fewer in the last step if the dataset does not divide evenly."""
    shares: Sequence[Share]
    """The non-empty shares of this rank's virtual ranks, in order."""
    is_dealt: bool = True
    """True if virtual rank v of V has the samples v, v + V, v + 2V, … of the batch; False if it has as many as it has
    made."""

    def versions(self) -> list[int]:
        """Return the versions of all tensors: equal later, unless one has been written to."""
        found: list[int] = []
        for share in self.shares:
            for micro_batch in share.micro_batches:
                _add_versions(micro_batch.items, found)
        return found

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> NoReturn:
        raise TypeError(f"a batch of unisono cannot be unpacked or looped over: {_REMEDY}")

    def __getitem__(self, key: object) -> NoReturn:
        raise TypeError(f"a batch of unisono has no entry {key!r}: {_REMEDY}")

    def __getattr__(self, name: str) -> NoReturn:
        message = f"a batch of unisono has no attribute {name!r}"
        raise AttributeError(message if name.startswith("_") else f"{message}: {_REMEDY}")

    @property
    def micro_batches(self) -> Iterator[Any]:
        """This rank's micro-batches, as collate_fn returned them."""
        return (micro_batch.items for share in self.shares for micro_batch in share.micro_batches)


def _add_versions(value: Any, found: list[int]) -> None:
    if isinstance(value, Tensor):
        found.append(-1 if value.is_inference() else value._version)
    elif isinstance(value, tuple | list):
        for item in value:
            _add_versions(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            _add_versions(item, found)
