"""The batches of an epoch as a loop gets them: an iterator that knows how many are left."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from unisono.data.batch import Batch

__all__ = ["EpochBatches"]


class EpochBatches(Iterator[Batch]):
    """An iterator over the batches that are left of an epoch.

    Args:
        batches: The batches.
        left: Their number; None if it is not known.
    """

    def __init__(self, batches: Generator[Batch, None, None], left: int | None) -> None:
        self._batches, self._left = batches, left

    def __next__(self) -> Batch:
        batch = next(self._batches, None)
        if batch is None:
            self._left = self._left and 0
            raise StopIteration
        if self._left:
            self._left -= 1
        return batch

    def __len__(self) -> int:
        """Return the number of batches that are left, the same on all ranks.

        Raises:
            TypeError: The dataset is iterable and has no `__len__`.
        """
        if self._left is None:
            raise TypeError(
                "the iterable dataset has no __len__, so the steps of an epoch are not known before its end"
            )
        return self._left

    @property
    def left(self) -> int | None:
        """The number of batches that are left, the same on all ranks; None if it is not known."""
        return self._left

    def close(self) -> None:
        """End the iteration, as the end of a loop over it does."""
        self._batches.close()
        self._left = self._left and 0

    def __bool__(self) -> bool:
        return True
