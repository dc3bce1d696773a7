"""Words in shared memory that say how far each rank is with an update, for the ranks that clear up after a death.

A process may be killed between any two stores. So each word is one store, made after all that it stands for: a rank
that reads the words of a dead one finds what that had finished, and never more. Words of ranks that live are read
only to wait for what they say, since plain stores do not order memory on arm64.
"""

from __future__ import annotations

import time
from collections.abc import Collection

from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.shm.segment import ALIGNMENT, aligned

__all__ = ["UpdateProgress"]

_WRITING, _DONE, _UNSETTLED, _SETTLED, _GAVE_UP, _BASES = range(6)

_PAUSE_S = 0.001


class UpdateProgress:
    """The progress of all ranks with the updates of one engine, which count from 1.

    Args:
        runtime: Allocates the words. Every rank must build this object.
        turns: The number of portions into which each rank's part is divided for copying.
    """

    def __init__(self, runtime: SharedRuntime, turns: int) -> None:
        self._runtime, self._turns = runtime, turns
        self._width = aligned(8 * (_BASES + turns)) // 8
        assert self._width * 8 % ALIGNMENT == 0
        segment = runtime.segment(8 * self._width * runtime.size, "update progress")
        self._words = memoryview(segment.memory)[: 8 * self._width * runtime.size].cast("q")
        self._own = self._words[runtime.rank * self._width : (runtime.rank + 1) * self._width]

    def copied(self, turn: int, update: int) -> None:
        """Record that one portion of this rank's part is copied, as it is before an update."""
        self._own[_BASES + turn] = update

    def begin(self, update: int) -> None:
        """Record that this rank writes its part from now on."""
        self._own[_WRITING] = update

    def end(self, update: int, *, unsettled: bool) -> None:
        """Record that this rank has written its part.

        Args:
            update: The number of the update.
            unsettled: True if there is new state that the others cannot see yet.
        """
        if unsettled:
            self._own[_UNSETTLED] = update
        self._own[_DONE] = update

    def settle(self, update: int) -> None:
        """Record that this rank's new state is where all ranks see it."""
        self._own[_SETTLED] = update

    def give_up(self, attempt: int) -> None:
        """Record that this rank does not end the given attempt at a step, unless it has already."""
        self._own[_GAVE_UP] = attempt

    def base(self, rank: int, turn: int) -> int:
        """Return the number of the update before which a portion of a rank's part was last copied."""
        return self._words[rank * self._width + _BASES + turn]

    def writers(self, after: int) -> list[int]:
        """List the ranks that have begun to write their parts in an update later than the given one."""
        return [rank for rank, update in enumerate(self._column(_WRITING)) if update > after]

    def committed(self) -> int:
        """Return the last update that all ranks have ended. No rank may be in an update."""
        last = max(self._column(_DONE))
        return last - bool(self._unfinished(last))

    def wait_until_committed(self, update: int, attempt: int) -> bool:
        """Wait until all ranks have ended an update, or some rank never will. Return True if all have ended it.

        All ranks that call it get the same answer, whatever became of the barrier at the update's end. It is called
        by ranks that have ended it themselves.

        Args:
            update: The number of the update.
            attempt: The number of this attempt at a step.
        """
        end_s = time.monotonic() + self._runtime.timeout_s
        while unfinished := self._unfinished(update):
            # A rank may have ended the update before it died or gave up: so look again, now that it can do no more.
            gone = self._gone(attempt)
            if self._runtime.rank in unfinished or gone.intersection(self._unfinished(update)):
                return False  # this rank has ended the update, but not settled, if another one has to
            if time.monotonic() > end_s:
                return False
            time.sleep(_PAUSE_S)
        return True

    def _unfinished(self, update: int) -> list[int]:
        """List the ranks that have not ended an update."""
        late = [rank for rank, done in enumerate(self._column(_DONE)) if done < update]
        if not late and update in self._column(_UNSETTLED):
            late = [rank for rank, settled in enumerate(self._column(_SETTLED)) if settled < update]
        return late

    def _gone(self, attempt: int) -> set[int]:
        given_up: Collection[int] = [rank for rank, number in enumerate(self._column(_GAVE_UP)) if number == attempt]
        return {*self._runtime.dead(), *given_up}

    def _column(self, word: int) -> list[int]:
        return self._words[word :: self._width].tolist()
