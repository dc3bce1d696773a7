"""What a display is shown: the seam between the reader of events and the looks.

`progress.Progress` reads events and keeps an `EpochView`; a `Renderer` draws. `plain.PlainLook` is for files,
`terminal.TerminalLook` for people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from unisono.watch.figures import format_bytes, format_value

__all__ = ["EpochView", "LossSum", "Renderer"]


class LossSum(NamedTuple):
    """Losses of some steps of one optimizer."""

    total: float
    """Sum over the samples."""
    samples: int


@dataclass(kw_only=True, slots=True)
class EpochView:
    """How far an epoch is, or a loop of the user's own, from events alone. Times are those of the events."""

    label: str
    """For example "epoch 3/5"."""
    number: int
    """From 0; loops of the user's own have negative numbers."""
    steps: int | None
    """In the epoch, if known."""
    first: int = 0
    """Steps of the epoch that were done before a resume."""
    done: int
    """Steps of the epoch that are done, also those before a resume."""
    started_s: float
    latest_s: float
    items: float = 0.0
    """What the rate counts, since the epoch started here: without what came before a resume."""
    losses: Mapping[str, LossSum] = field(default_factory=dict)
    """By optimizer, "" for a single one. Replaced at every step, never changed: looks may keep it."""
    later_steps: int = 0
    """Steps of the run after this epoch, if known."""
    later_s: float = 0.0
    """Time that the run will spend between its epochs from here on, on evaluations and the like."""
    lr: float | None = None
    """Of the latest step, as the next two."""
    grad_norm: float | None = None
    memory: int | None = None
    note: str = ""
    """What stands in the place of the loss."""
    counted: str = "steps"
    """What steps are called."""
    unit: str = "samples"
    """What the rate counts."""
    told: bool = True
    """True if the latest step has been told as a line; there is nothing to tell at the start."""

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
            step_s: time that a step takes.
        """
        if self.steps is None or step_s is None:
            return None
        return (self.steps - self.done + self.later_steps) * step_s + self.later_s

    def loss_text(self, since: Mapping[str, LossSum] | None = None) -> str:
        """Write the mean loss of the epoch's steps, or of those since an earlier state of `losses`.

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
        """Write what else is known of the latest step, most important first."""
        figures = [] if self.lr is None else [f"lr {self.lr:.3g}"]
        if self.grad_norm is not None:
            figures.append(f"norm {format_value(self.grad_norm)}")
        if self.memory is not None:
            figures.append(format_bytes(self.memory))
        return figures

    def steps_text(self) -> str:
        """Write the steps done and their total, if known, as wide for the first step as for the last.

        >>> view = EpochView(label="epoch 1", number=0, steps=12, done=9, started_s=0, latest_s=0)
        >>> view.steps_text()
        ' 9/12'
        """
        return f"{self.done:>5}" if self.steps is None else f"{self.done:>{len(str(self.steps))}}/{self.steps}"


class Renderer(Protocol):
    """Draws what the reader of events tells. One thread at a time."""

    def header(self, parts: Sequence[str]) -> None:
        """Tell that a run starts, and its figures."""

    def remark(self, text: str) -> None:
        """Tell something that stays, such as a resume or the end."""

    def warning(self, text: str) -> None:
        """Tell something that stays and that the user should see."""

    def saved(self, text: str) -> None:
        """Tell something of the moment that need not stay."""

    def moved(self, epoch: EpochView) -> None:
        """Show an epoch that started or made a step. Called for every step: must be cheap on average."""

    def stood(self, epoch: EpochView) -> None:
        """Tell where an epoch stands or ended, as a line that stays."""

    def evaluated(self, label: str, metrics: Sequence[str]) -> None:
        """Tell the results of an evaluation, as a line that stays."""

    def rest(self) -> None:
        """Show that no epoch is running."""

    def write(self, text: str) -> None:
        """Pass on whole lines of somebody else, untouched."""

    def close(self) -> None:
        """Leave the stream as it was found."""
