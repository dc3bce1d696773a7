"""The interface between the reader of events and the renderers that draw the progress.

`display.Progress` reads events and keeps an `EpochView`; a `Renderer` draws it. `plain_renderer.PlainRenderer` is for
files, `terminal_renderer.TerminalRenderer` for terminals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from unisono.watch.figures import format_bytes, format_value

__all__ = ["EpochView", "Renderer", "RunningSum"]


class RunningSum(NamedTuple):
    """The sum of a loss, or of another value that a loss function returned, over some steps."""

    label: str
    total: float = 0.0
    """Sum over the samples."""
    samples: int = 0

    def plus(self, mean: float, samples: int) -> RunningSum:
        """Return the sum with that of another step, from its mean."""
        return RunningSum(self.label, self.total + mean * samples, self.samples + samples)

    def mean(self, since: RunningSum | None = None) -> float:
        """Return the mean over the samples, or over those since an earlier state, if there are any; NaN if none.

        >>> later, earlier = RunningSum("loss", 30.0, 20), RunningSum("loss", 10.0, 10)
        >>> later.mean(), later.mean(earlier), later.mean(later)
        (1.5, 2.0, 1.5)
        """
        if since is None or since.samples >= self.samples:
            return self.total / self.samples if self.samples else math.nan
        return (self.total - since.total) / (self.samples - since.samples)


@dataclass(kw_only=True, slots=True)
class EpochView:
    """The progress of an epoch or of a user loop, from events alone. Times are those of the events."""

    label: str
    """For example "epoch 3/5"."""
    number: int
    """Number of the epoch, from 0; user loops have negative numbers."""
    steps: int | None
    """Steps of the epoch, if known."""
    first: int = 0
    """Steps of the epoch that were done before a resume."""
    done: int
    """Steps of the epoch that are done, also those before a resume."""
    started_s: float
    latest_s: float
    items: float = 0.0
    """Count of items for the rate, since the epoch started here: without those before a resume."""
    losses: Mapping[str, RunningSum] = field(default_factory=dict)
    """Losses by optimizer, "" for a single one. Replaced at every step, never changed: renderers may keep it."""
    values: Mapping[str, RunningSum] = field(default_factory=dict)
    """Further values of the loss functions by name, kept like the losses."""
    later_steps: int = 0
    """Steps of the run after this epoch, if known."""
    later_s: float = 0.0
    """Time that the rest of the run will spend between its epochs, on evaluations and the like."""
    lr: float | None = None
    """Learning rate of the latest step, as `grad_norm` is of it; `memory` is the latest known number of bytes."""
    grad_norm: float | None = None
    memory: int | None = None
    logged: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """The latest numbers that the user's loop logged, with their labels, by name."""
    note: str = ""
    """Text to show in place of the loss."""
    counted: str = "steps"
    """Name of the steps."""
    unit: str = "samples"
    """Name of the items that the rate counts."""
    told: bool = True
    """True if a line about the latest step has been written; there is nothing to write at the start."""

    @property
    def elapsed_s(self) -> float:
        """Time from the start of the epoch, or from its resume, to the latest step."""
        return max(0.0, self.latest_s - self.started_s)

    @property
    def rate(self) -> float | None:
        """Mean items per second over the epoch so far."""
        return self.items / self.elapsed_s if self.items and self.elapsed_s > 0 else None

    @property
    def step_s(self) -> float | None:
        """Mean time of a step over the epoch so far."""
        return self.elapsed_s / (self.done - self.first) if self.done > self.first else None

    def remaining_s(self, step_s: float | None) -> float | None:
        """Return the time to the end of the run, or of the epoch where the run's length is not known.

        Args:
            step_s: Time that a step takes.
        """
        if self.steps is None or step_s is None:
            return None
        return (self.steps - self.done + self.later_steps) * step_s + self.later_s

    def loss_text(self, since: Mapping[str, RunningSum] | None = None) -> str:
        """Format the mean loss of the epoch's steps, or of those since an earlier state of `losses`.

        >>> view = EpochView(label="", number=0, steps=9, done=2, started_s=0, latest_s=0)
        >>> view.losses = {"": RunningSum("loss", 30.0, 20)}
        >>> view.loss_text(), view.loss_text({"": RunningSum("loss", 10.0, 10)})
        ('loss 1.5000', 'loss 2.0000')
        """
        losses = {name: each for name, each in self.losses.items() if each.samples}
        return self.note or "  ".join(" ".join(pair) for pair in _means(losses, since))

    def value_texts(self, since: Mapping[str, RunningSum] | None = None) -> list[tuple[str, str]]:
        """Return labels and means of the further values, as `loss_text` does for the loss.

        >>> view = EpochView(label="", number=0, steps=9, done=2, started_s=0, latest_s=0)
        >>> view.values = {"accuracy": RunningSum("accuracy", 15.0, 20)}
        >>> view.value_texts()
        [('accuracy', '0.7500')]
        """
        return _means(self.values, since)

    def figures(self) -> list[str]:
        """Format the other known figures, the most important first: logged numbers, then figures of the step."""
        figures = [f"{label} {format_value(value)}" for label, value in self.logged.values()]
        if self.lr is not None:
            figures.append(f"lr {self.lr:.3g}")
        if self.grad_norm is not None:
            figures.append(f"norm {format_value(self.grad_norm)}")
        if self.memory is not None:
            figures.append(format_bytes(self.memory))
        return figures

    def steps_text(self) -> str:
        """Format the steps done and their total, if known, with the same width for all steps.

        >>> view = EpochView(label="epoch 1", number=0, steps=12, done=9, started_s=0, latest_s=0)
        >>> view.steps_text()
        ' 9/12'
        """
        return f"{self.done:>5}" if self.steps is None else f"{self.done:>{len(str(self.steps))}}/{self.steps}"


class Renderer(Protocol):
    """Draws for the reader of events. One thread at a time calls it."""

    def header(self, parts: Sequence[str]) -> None:
        """Write that a run starts, with its figures."""

    def remark(self, text: str) -> None:
        """Write a permanent line, such as a resume or the end."""

    def warning(self, text: str) -> None:
        """Write a permanent line that the user should see."""

    def saved(self, text: str) -> None:
        """Display a transient message."""

    def moved(self, epoch: EpochView) -> None:
        """Draw an epoch that started or made a step. Called for every step: must be cheap on average."""

    def stood(self, epoch: EpochView) -> None:
        """Write the state or the end of an epoch, as a permanent line."""

    def evaluated(self, label: str, metrics: Sequence[str]) -> None:
        """Write the results of an evaluation, as a permanent line."""

    def rest(self) -> None:
        """Remove the display of a running epoch: none is running now."""

    def write(self, text: str) -> None:
        """Write whole lines from other code, unchanged."""

    def close(self) -> None:
        """Restore the stream."""


def _means(sums: Mapping[str, RunningSum], since: Mapping[str, RunningSum] | None) -> list[tuple[str, str]]:
    return [(each.label, format_value(each.mean((since or {}).get(name)))) for name, each in sums.items()]
