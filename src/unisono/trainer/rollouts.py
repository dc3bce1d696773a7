"""Batches that a user's function makes for each virtual rank, such as the episodes of reinforcement learning.

They replace the batches of a dataset: an epoch has a fixed number of them, and each is made when the loop asks for it,
with the weights of that moment. The random numbers depend on (seed, epoch, step, virtual rank), so nothing is saved,
and a resumed run makes the next batch as an uninterrupted run would have made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from unisono.data.batch import Batch, MicroBatch, Share
from unisono.errors import DataError
from unisono.plan import num_dealt
from unisono.trainer.nested import map_tensors, tensors_of
from unisono.trainer.virtual_rank_calls import VirtualRankCalls

__all__ = ["Rollouts"]

_CALL = "trainer.rollouts"


class Rollouts:
    """This rank's part of every batch that a function makes.

    Args:
        calls: Calls the function.
        function: Called as function(models) for each virtual rank; returns its samples.
        steps: Batches of an epoch.
        micro_batch_size: The largest number of samples that go through the model at once. None: whole shares.
    """

    num_samples = None
    """The number of samples in an epoch is not known."""

    def __init__(
        self, calls: VirtualRankCalls, function: Callable[[Any], Any], *, steps: int, micro_batch_size: int | None
    ) -> None:
        self._calls, self._function, self._width = calls, function, micro_batch_size
        self.steps = steps
        """Number of steps in an epoch."""

    @property
    def identity(self) -> dict[str, Any]:
        """The facts about the data of its epoch that a run records; see `LoaderSettings.identity`."""
        return {"batch_size": None, "num_samples": None, "shuffle": False, "drop_last": False}

    def batches(self, *, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield this rank's part of each batch of an epoch, starting at `first_step`. Every rank must iterate.

        Ranks exchange their numbers of samples, in one small message for each batch.

        Raises:
            DataError: The function returned anything other than samples, or wrote to the model.
            GroupError: It called a collective.
            PeerError: It failed on another rank.
        """
        for step in range(first_step, self.steps):
            results, everyone = self._calls.call(
                self._function,
                name=_CALL,
                stream="rollouts",
                moment=(epoch, step),
                pack=lambda results: {v: _count(v, samples) for v, samples in results.items()},
            )
            counts = {v: count for of_rank in everyone for v, count in of_rank.items()}
            size, virtual_ranks = sum(counts.values()), self._calls.run.virtual_ranks
            starts = {v: sum(counts[u] for u in range(v)) for v in results}
            shares = [self._share(v, samples, starts[v], counts[v]) for v, samples in results.items()]
            is_dealt = all(counts[v] == num_dealt(size, v, virtual_ranks) for v in range(virtual_ranks))
            yield Batch(epoch, step, size, shares, is_dealt)

    def _share(self, virtual_rank: int, samples: Any, start: int, count: int) -> Share:
        width = self._width or count
        parts = [range(first, min(first + width, count)) for first in range(0, count, width)]
        return Share(
            virtual_rank,
            [MicroBatch(_rows(samples, part), range(start + part.start, start + part.stop)) for part in parts],
        )


def _count(virtual_rank: int, samples: Any) -> int:
    """Return the number of samples that a function has returned for a virtual rank.

    >>> _count(0, {"states": torch.zeros(3, 4), "actions": torch.zeros(3)})
    3
    """
    of = f"the function of {_CALL} returned for virtual rank {virtual_rank}"
    remedy = "return tensors with a row for each sample, or a tuple, list or dict of such tensors"
    try:
        tensors = tensors_of(samples)
    except TypeError as error:
        raise DataError(f"{of} {error}; {remedy}.") from None
    shapes = [list(tensor.shape) for tensor in tensors]
    if not tensors:
        raise DataError(f"{of} no tensor: {remedy}.")
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise DataError(f"{of} tensors of the shapes {', '.join(map(str, shapes))}: {remedy}.")
    if not shapes[0][0]:
        raise DataError(f"{of} no samples: each virtual rank needs at least one in every batch.")
    return int(shapes[0][0])


def _rows(samples: Any, part: range) -> Any:
    def cut(tensor: Tensor) -> Tensor:
        rows = tensor.detach()[part.start : part.stop]
        if not rows.is_inference():
            return rows
        with torch.inference_mode(False):  # tensors made in inference_mode cannot be used in a backward pass
            return rows.clone()

    return map_tensors(samples, cut)
