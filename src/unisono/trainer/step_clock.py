"""Where the time of steps goes on each rank: reading data, forward and backward, waiting for others, sum and update.

Some steps are measured, and ranks exchange the sums about once a second, so that rank 0 can tell them. Rank 0 hands out
in each exchange when the next one comes: all ranks must know alike. Start reading at `StepClock.exchange`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from unisono.activity import waited
from unisono.collectives.world import World
from unisono.watch import EventLog
from unisono.watch.loop_fields import StepParts

__all__ = ["MeasuringSchedule", "StepClock"]

_EVERY_S = 1.0
"""Seconds between two exchanges."""
_MEASURED_S = 0.1
"""Of shorter steps, only one in this time is measured: that costs some 70 µs, as the code and the data of the
interpreter have left the processor's caches while a step computes."""
_FIRST = 8
"""Steps after which the first exchange comes, and the factor by which an interval may grow."""
# Primes: a stall that comes with every second or every tenth batch is then met as often as it comes.
_STRIDES = (1, 3, 7, 13, 31, 61, 127)


class MeasuringSchedule(NamedTuple):
    """When ranks measure and exchange their times, as rank 0 hands it out."""

    exchange_at: int
    """The exchange is in the first step that begins with so many steps of the run done."""
    stride: int
    """One step in so many is measured, and the last one before the exchange; 0 for none, and no exchange follows."""

    @classmethod
    def following(cls, done: int, *, steps: int, step_s: float) -> MeasuringSchedule:
        """Return the schedule that follows an exchange. Pure.

        Args:
            done: Steps of the run that are done.
            steps: Steps since the exchange before.
            step_s: Seconds of one of them.

        >>> MeasuringSchedule.following(100, steps=8, step_s=0.001)
        MeasuringSchedule(exchange_at=164, stride=127)
        >>> MeasuringSchedule.following(100, steps=900, step_s=0.001)
        MeasuringSchedule(exchange_at=1100, stride=127)
        >>> MeasuringSchedule.following(100, steps=8, step_s=3.0)
        MeasuringSchedule(exchange_at=101, stride=1)
        """
        wanted = max(1, min(round(_EVERY_S / max(step_s, 1e-6)), _FIRST * max(1, steps)))
        stride = next((each for each in _STRIDES if each * step_s >= _MEASURED_S), _STRIDES[-1])
        return cls(done + wanted, stride)


class _Times(NamedTuple):
    """The seconds of a rank: in the measured steps together, or in one of them."""

    steps: float = 0.0
    seconds: float = 0.0
    """From the end of a step to the end of the next one."""
    data: float = 0.0
    compute: float = 0.0
    waiting: float = 0.0
    update: float = 0.0

    def plus(self, other: _Times) -> _Times:
        """Return the sums."""
        return _Times(
            self.steps + other.steps,
            self.seconds + other.seconds,
            self.data + other.data,
            self.compute + other.compute,
            self.waiting + other.waiting,
            self.update + other.update,
        )


class StepClock:
    """Measures the steps of this rank. It costs the check of a flag while no step is measured.

    Args:
        device: The device of the steps. The host does not see where the time of a GPU goes, which computes while the
            host goes on: all of a step counts as computing there.
    """

    def __init__(self, device: torch.device) -> None:
        self._sees_device = device.type == "cpu"
        self._log = EventLog()
        self.restart()

    def restart(self) -> None:
        """Forget what has been measured: the ranks are not those from before. Every rank must call it."""
        self.is_measuring = False
        """True if the next step is measured, and the wait for its batch."""
        self.is_due = True
        """True if ranks exchange their times in the next step: alike on ranks that are in the same step. The first one
        tells whether there is a log."""
        self._exchange_at = self._stride = 0
        self._exchanged_at = 0
        self._sums = self._last = _Times()
        self._done = self._calls = 0
        self._ended_s = self._begun_s = self._computed_s = 0.0
        self._data_s = self._waited_s = self._waited_before_s = 0.0
        self._found: tuple[int, int, list[tuple[_Times, _Times]]] | None = None

    def attach(self, log: EventLog) -> None:
        """Tell times to a log from now on. That of rank 0 decides whether they are measured."""
        self._log = log

    def add_data(self, seconds: float) -> None:
        """Add what the loop has waited for its batch, before a step that is measured."""
        self._data_s += seconds

    def begin(self, done: int) -> None:
        """Note that a step begins, after so many of the run, which is measured or in which ranks exchange times."""
        self._done = done
        if self.is_measuring:
            self._begun_s = self._computed_s = time.perf_counter()
            waited.is_on = True
            self._waited_s = self._waited_before_s = waited.seconds

    def end_compute(self) -> None:
        """Note that this rank has run its forward and backward passes of a step that is measured."""
        self._computed_s, self._waited_s = time.perf_counter(), waited.seconds

    def end(self, done: int) -> None:
        """Note that a step has ended, and choose whether to measure the next one, after so many steps of the run."""
        if self._found is not None:
            self._tell()
        if not self._stride:
            return
        self._calls += 1
        if self.is_measuring:
            now = time.perf_counter()
            waited.is_on = False
            before_s, after_s = self._waited_s - self._waited_before_s, waited.seconds - self._waited_s
            self._last = _Times(
                1,
                now - self._ended_s,
                self._data_s,
                self._computed_s - self._begun_s - before_s,
                before_s + after_s,
                now - self._computed_s - after_s,
            )
            self._sums = self._sums.plus(self._last)
        self.is_due = done >= self._exchange_at
        self.is_measuring = self._calls % self._stride == 0 or done + 1 == self._exchange_at
        if self.is_measuring:
            self._data_s, self._ended_s = 0.0, time.perf_counter()

    def exchange(self, world: World) -> None:
        """Exchange the times of the steps before this one, and when to do so again. Every rank must call it.

        Traffic: an all-gather of 112 bytes.
        """
        schedule = MeasuringSchedule(0, 0)
        if world.rank == 0 and self._log.hears("times"):
            steps, sums = self._done - self._exchanged_at, self._sums
            schedule = MeasuringSchedule(self._done + _FIRST, 1)
            if sums.steps and steps > 0:
                schedule = MeasuringSchedule.following(self._done, steps=steps, step_s=sums.seconds / sums.steps)
        found = world.gather_numbers([*schedule, *self._sums, *self._last])
        self._exchange_at, self._stride = (round(number) for number in found[0][:2])
        self._exchanged_at, self.is_due = self._done, False
        if world.rank == 0 and self._sums.steps:
            size = len(_Times._fields)
            times = [(_Times(*each[2 : 2 + size]), _Times(*each[2 + size :])) for each in found]
            self._found = self._done, self._calls, times
        self._sums = self._last = _Times()
        self._calls = 0

    def _tell(self) -> None:
        """Tell the times that have been exchanged in the last step, on rank 0, once the step has ended."""
        assert self._found is not None
        (done, calls, found), self._found = self._found, None
        sums, last = [of_rank for of_rank, _ in found], [of_rank for _, of_rank in found]
        self._log.emit(
            "times",
            total_steps=done,
            steps=round(sums[0].steps),
            of_steps=calls,
            seconds=round(sums[0].seconds, 6),
            **self._parts(sums),
            last={"seconds": round(last[0].seconds, 6), **self._parts(last)},
        )

    def _parts(self, times: Sequence[_Times]) -> StepParts:
        if not self._sees_device:
            whole = [round(each.compute + each.waiting + each.update, 6) for each in times]
            return {"data": [round(each.data, 6) for each in times], "compute": whole}
        return {
            "data": [round(each.data, 6) for each in times],
            "compute": [round(each.compute, 6) for each in times],
            "waiting": [round(each.waiting, 6) for each in times],
            "update": [round(each.update, 6) for each in times],
        }
