"""The renderer for files, pipes and CI: few lines, aligned columns, no control characters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from unisono.watch.figures import format_clock, format_elapsed, format_rate
from unisono.watch.renderer import EpochView, RunningSum

__all__ = ["PlainRenderer"]

_GAP = "   "


class PlainRenderer:
    """Writes one line per epoch and per evaluation, and within an epoch at most one every `interval_s`."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float], interval_s: float = 10.0) -> None:
        self._stream = stream
        self._clock = clock
        self._interval_s = interval_s
        self._epoch: int | None = None
        self._told_s = 0.0
        self._told: tuple[Mapping[str, RunningSum], Mapping[str, RunningSum]] = ({}, {})

    def header(self, parts: Sequence[str]) -> None:
        """Write one line with the figures of the run."""
        self.write(f"unisono: {', '.join(parts)}" if parts else "unisono")

    def remark(self, text: str) -> None:
        """Write the line."""
        self.write(text)

    def warning(self, text: str) -> None:
        """Write the line, marked as a warning."""
        self.write(f"warning: {text}")

    def saved(self, text: str) -> None:
        """Write nothing: in a file, checkpoints would be most of the lines. The event log has them."""

    def moved(self, epoch: EpochView) -> None:
        """Write the state of the epoch, with the means since the last line, if that line is `interval_s` old."""
        now_s = self._clock()
        if epoch.number != self._epoch:
            self._epoch, self._told_s, self._told = epoch.number, now_s, ({}, {})
        elif now_s - self._told_s >= self._interval_s and not epoch.told:
            self._told_s = now_s
            left = epoch.remaining_s(epoch.step_s)
            losses, values = self._told
            self._told = epoch.losses, epoch.values
            tail = "" if left is None else f"{_GAP}{format_clock(math.ceil(left))} left"
            self._tell(epoch, epoch.loss_text(losses), epoch.value_texts(values), tail)

    def stood(self, epoch: EpochView) -> None:
        """Write the state of the epoch."""
        self._told_s = self._clock()
        self._tell(epoch, epoch.loss_text(), epoch.value_texts(), "")

    def evaluated(self, label: str, metrics: Sequence[str]) -> None:
        """Write one line with all metrics."""
        self.write(_GAP.join(filter(None, (label, *metrics))))

    def rest(self) -> None:
        """Forget the epoch."""
        self._epoch = None

    def write(self, text: str) -> None:
        """Write the text and a line end, in one call: lines of processes that share a file do not mix."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Do nothing: every line is already flushed."""

    def _tell(self, epoch: EpochView, loss: str, values: Sequence[tuple[str, str]], tail: str) -> None:
        epoch.told = True
        rate = "" if epoch.rate is None else f"{format_rate(epoch.rate):>7} {epoch.unit}/s"
        columns = (epoch.label, f"{epoch.steps_text()} {epoch.counted}", f"{loss:<13}", f"{rate:>17}")
        # Behind the columns, so that those stay aligned however many values there are.
        figures = "".join(_GAP + figure for figure in (*map(" ".join, values), *epoch.figures()))
        self.write(f"{_GAP.join(columns)}{_GAP}{format_elapsed(epoch.elapsed_s):>7}{tail}{figures}")
