"""The interface between the reader of events and the renderers that draw the progress.

`display.Progress` reads events and keeps an `EpochView`; a `Renderer` draws it. `plain_renderer.PlainRenderer` is for
files, `terminal_renderer.TerminalRenderer` for terminals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from unisono.watch.figures import format_bytes, format_value

__all__ = ["EpochView", "LossSum", "Renderer"]


class LossSum(NamedTuple):
    """The sum of the losses of some steps of one optimizer."""

    total: float
    """Sum over the samples."""
    samples: int


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
    losses: Mapping[str, LossSum] = field(default_factory=dict)
    """Losses by optimizer, "" for a single one. Replaced at every step, never changed: renderers may keep it."""
    later_steps: int = 0
    """Steps of the run after this epoch, if known."""
    later_s: float = 0.0
    """Time that the rest of the run will spend between its epochs, on evaluations and the like."""
    lr: float | None = None
    """Learning rate of the latest step, as `grad_norm` is of it; `memory` is the latest known number of bytes."""
    grad_norm: float | None = None
    memory: int | None = None
    logged: Mapping[str, float] = field(default_factory=dict)
    """The latest numbers that the user's loop logged."""
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

    def loss_text(self, since: Mapping[str, LossSum] | None = None) -> str:
        """Format the mean loss of the epoch's steps, or of those since an earlier state of `losses`.

        >>> view = EpochView(label="", number=0, steps=9, done=2, started_s=0, latest_s=0)
        >>> view.losses = {"": LossSum(30.0, 20)}
        >>> view.loss_text(), view.loss_text({"": LossSum(10.0, 10)}), view.loss_text(view.losses)
        ('loss 1.5000', 'loss 2.0000', 'loss 1.5000')
        """
        if self.note:
            return self.note
        texts = []
        for name, (total, samples) in self.losses.items():
            before = (since or {}).get(name, LossSum(0.0, 0))
            if before.samples >= samples:
                before = LossSum(0.0, 0)
            if samples:
                mean = (total - before.total) / (samples - before.samples)
                texts.append(f"{name or 'loss'} {format_value(mean)}")
        return "  ".join(texts)

    def figures(self) -> list[str]:
        """Format the other known figures of the latest step, the most important first."""
        figures = [] if self.lr is None else [f"lr {self.lr:.3g}"]
        if self.grad_norm is not None:
            figures.append(f"norm {format_value(self.grad_norm)}")
        if self.memory is not None:
            figures.append(format_bytes(self.memory))
        return figures + [f"{name} {format_value(value)}" for name, value in self.logged.items()]

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
        """Show a message that need not stay."""

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
