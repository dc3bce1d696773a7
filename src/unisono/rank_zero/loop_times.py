"""Where the time of steps goes in a loop of one's own: for batches, for other ranks, and the rest.

Nothing in such a loop says where a pass or an update begins, so the rest is not divided. Start reading at
`LoopTimes.end_step`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unisono.activity import loaded, waited

if TYPE_CHECKING:
    from unisono.watch.loop_fields import StepParts, TimesFields

__all__ = ["LoopTimes"]

_EVERY_S = 1.0
"""Seconds between two events."""


class LoopTimes:
    """Measures each step of this process, from the end of one to the end of the next. Cost: 1 µs for a step.

    On a GPU only waits for batches are seen: the host goes on while the GPU computes and waits.
    """

    def __init__(self) -> None:
        self._told_s: float | None = None
        self._ended_s = self._loaded_s = self._waited_s = 0.0
        self._is_whole = False  # the first step has begun before the loop did
        self._sees_waits = False
        self._seconds = self._data = self._waiting = 0.0
        self._last = (0.0, 0.0, 0.0)
        self._steps = self._of_steps = self._measured = 0

    def leave_out(self) -> None:
        """Leave the step that is under way out: it has something else in it, such as an evaluation."""
        self._is_whole = False

    def end_step(self, now_s: float, done: int) -> TimesFields | None:
        """Note that a step has ended, and return what is to be told if it is time to do so.

        Args:
            now_s: The time, of the monotonic clock.
            done: Steps of the run that are done.
        """
        data_s, waited_s = loaded.seconds, waited.seconds
        self._of_steps += 1
        if self._is_whole:
            seconds = now_s - self._ended_s
            data = min(data_s - self._loaded_s, seconds)
            waiting = min(waited_s - self._waited_s, seconds - data)  # other threads may have waited too
            self._seconds += seconds
            self._data += data
            self._waiting += waiting
            self._last = seconds, data, waiting
            self._steps, self._measured = self._steps + 1, done
        self._is_whole = waited.is_on = loaded.is_on = True  # a Trainer may have turned them off
        self._ended_s, self._loaded_s, self._waited_s = now_s, data_s, waited_s
        if self._told_s is None:
            self._told_s = now_s
        if now_s - self._told_s < _EVERY_S:
            return None
        self._told_s = now_s
        return self.take()

    def take(self) -> TimesFields | None:
        """Return what has not been told yet, and begin anew; None if no step has been measured."""
        if not self._steps:
            return None
        self._sees_waits |= self._waiting > 0
        found: TimesFields = {
            "total_steps": self._measured,
            "steps": self._steps,
            "of_steps": self._of_steps,
            "seconds": round(self._seconds, 6),
            **self._parts(self._seconds, self._data, self._waiting),
            "last": {"seconds": round(self._last[0], 6), **self._parts(*self._last)},
        }
        self._seconds = self._data = self._waiting = 0.0
        self._steps = self._of_steps = 0
        return found

    def stop(self) -> None:
        """Measure no longer."""
        waited.is_on = loaded.is_on = False

    def _parts(self, seconds: float, data_s: float, waiting_s: float) -> StepParts:
        data = [round(data_s, 6)]
        if not self._sees_waits or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {"data": data, "compute": [round(seconds - data_s, 6)]}
        compute_s = max(0.0, seconds - data_s - waiting_s)
        return {"data": data, "compute": [round(compute_s, 6)], "waiting": [round(waiting_s, 6)]}
