"""The policy for checkpoints: when a run is saved, and how many checkpoints are kept.

Settings and one pure function; the caller passes times and counts. The rule by minutes depends on a clock; ranks need
not agree, since rank 0 alone writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from unisono.arguments import choice, flag, real, text, whole

__all__ = ["Checkpoints", "check_tag", "is_due"]

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """When a run is saved, and how many checkpoints are kept. Each rule that is set applies independently.

    With all rules off, a run is saved only when its code saves it.

    Raises:
        TypeError: A setting has the wrong type.
        ValueError: A number is too small or NaN.
    """

    every_steps: int | None = None
    """Save after this many steps since the last save. None: not by steps."""
    every_minutes: float | None = 10.0
    """Save after this many minutes since the last save: the most work that a power cut can cost. None: not by time."""
    every_epoch: bool = True
    """Save at the end of each epoch."""
    keep: int = 3
    """The newest `keep` checkpoints are kept on disk, and keep + 1 while one is written. More than one, so that a
    damaged newest checkpoint costs an interval and not the run."""
    incremental: bool | None = None
    """True to store only the rows that have changed, of tensors of 1 MiB or more, until these take as much space as the
    whole. False to write complete files, which other programs read without unisono. None: True for a model with
    embedding tables."""
    best: str | None = None
    """Also keep the checkpoint with the best value of this metric, until a better one is on disk. The metric is named
    as `Trainer.evaluate` reports it: its `name`, the key of a dict, or "name/key" if several evaluations have that
    key."""
    mode: Literal["max", "min"] | None = None
    """Which values of `best` are better: "max", as for an accuracy, or "min", as for a loss."""

    def __post_init__(self) -> None:
        flag("every_epoch", self.every_epoch)
        if self.incremental is not None:
            flag("incremental", self.incremental)
        whole("keep", self.keep, meant="a whole number of checkpoints")
        if self.every_steps is not None:
            whole("every_steps", self.every_steps, meant="a whole number of steps, or None")
            if self.every_steps < 1:
                raise ValueError(
                    f"every_steps={self.every_steps} must be at least 1; None saves by the other rules only"
                )
        if self.every_minutes is not None and not real("every_minutes", self.every_minutes) > 0:
            raise ValueError(
                f"every_minutes={self.every_minutes} must be positive; None saves by the other rules only, and "
                f"every_steps=1 saves after every step"
            )
        if self.keep < 1:
            raise ValueError(
                f"keep={self.keep} must be at least 1: a run without any checkpoint cannot be resumed. To write none, "
                f"give the run no directory"
            )
        choice("mode", self.mode, ("max", "min", None))
        if self.best is not None:
            text("best", self.best)
            if self.mode is None:
                raise ValueError(
                    f'best={self.best!r} needs a mode: mode="max" if greater values are better, mode="min" if smaller '
                    "ones are"
                )
        elif self.mode is not None:
            raise ValueError(f'mode={self.mode!r} is for the metric of best=..., such as best="accuracy"')


def check_tag(tag: object) -> str:
    """Return the tag of a checkpoint, which becomes part of a folder's name.

    Raises:
        TypeError: The tag is not a string.
        ValueError: The tag is "best" or not such a name.

    >>> check_tag("before-finetuning")
    'before-finetuning'
    """
    name = text("tag", tag)
    if name == "best":
        raise ValueError('tag="best" is the name of the checkpoint that Checkpoints(best=...) keeps: choose another')
    if not _TAG.fullmatch(name):
        raise ValueError(
            f"tag={tag!r} becomes the name of a folder: use up to 100 letters, digits and '_', '.', '+', '=', '-', and "
            "begin with a letter, a digit or '_'"
        )
    return name


def is_due(policy: Checkpoints, *, steps_since: int, seconds_since: float, epoch_ended: bool) -> bool:
    """Return True if a run should be saved now. Pure.

    `steps_since` and `seconds_since` count from the last save, or from the start. Without a step there is nothing new
    to save, so the result is False.

    >>> is_due(Checkpoints(every_steps=100), steps_since=100, seconds_since=5.0, epoch_ended=False)
    True
    >>> is_due(Checkpoints(every_minutes=10), steps_since=1, seconds_since=599.0, epoch_ended=False)
    False
    """
    if steps_since < 1:
        return False
    by_steps = policy.every_steps is not None and steps_since >= policy.every_steps
    by_time = policy.every_minutes is not None and seconds_since >= 60.0 * policy.every_minutes
    return by_steps or by_time or (policy.every_epoch and epoch_ended)
