"""What a display is shown: the seam between the reader of events and the looks.

`progress.Progress` reads events and keeps an `EpochView`; a `Look` draws. `plain.PlainLook` is for files,
`terminal.TerminalLook` for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["EpochView", "Look"]


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
    samples: int = 0
    """Since it started here: without those before a resume."""
    loss: float | None = None
    """Of the latest step."""
    note: str = ""
    """What stands in the place of the loss."""
    counted: str = "steps"
    """What steps are called."""
    unit: str = "samples"
    """What the rate counts."""
    told: bool = True
    """Whether the latest step has been told as a line; there is nothing to tell at the start."""

    @property
    def elapsed_s(self) -> float:
        """Time from the start of the epoch, or from its resume, to the latest step."""
        return max(0.0, self.latest_s - self.started_s)

    @property
    def rate(self) -> float | None:
        """Mean samples per second over the epoch so far."""
        return self.samples / self.elapsed_s if self.samples and self.elapsed_s > 0 else None

    @property
    def remaining_s(self) -> float | None:
        """Time to the end of the epoch at its mean pace so far."""
        if self.steps is None or self.done <= self.first:
            return None
        return (self.steps - self.done) * self.elapsed_s / (self.done - self.first)

    def steps_text(self) -> str:
        """Write the steps done and their total, if known, as wide for the first step as for the last.

        >>> view = EpochView(label="epoch 1", number=0, steps=12, done=9, started_s=0, latest_s=0)
        >>> view.steps_text()
        ' 9/12'
        """
        return f"{self.done:>5}" if self.steps is None else f"{self.done:>{len(str(self.steps))}}/{self.steps}"


class Look(Protocol):
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
