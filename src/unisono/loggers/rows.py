"""The part of an event that loggers write: numbers, texts and images by name, at a step of the run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unisono.watch.event_kinds import Event

__all__ = ["ImageFile", "Row", "read_row", "steps_done"]

_OF_A_STEP = ("loss", "lr", "grad_norm", "weight", "step_s", "memory")


class ImageFile(NamedTuple):
    """An image that the run has logged."""

    path: Path
    """A PNG file."""
    caption: str | None


class Row(NamedTuple):
    """Numbers, texts and images of one step of the run."""

    step: int
    """Steps of the run done, the event's own included."""
    epoch: int
    """Number of the epoch, from 0."""
    time: float
    """Unix seconds."""
    values: dict[str, float]
    """Numbers by name; there may be none."""
    texts: dict[str, str]
    images: dict[str, ImageFile]


def read_row(event: Event, *, step: int, folder: Path | None = None) -> Row | None:
    """Return the numbers, texts and images in an event; None if its kind has none.

    A step has "train/loss", "train/lr" and so on; an evaluation "test/accuracy", with its own name and that of the
    metric; `trainer.log` the names that it got.

    Args:
        event: An event of a run.
        step: The number of steps done before the event, for kinds of events without it.
        folder: The directory of the run, in which images are.

    >>> event = {"time": 7.0, "event": "log", "epoch": 0, "total_steps": 3, "values": {"temperature": 0.5}}
    >>> read_row(event, step=0)
    Row(step=3, epoch=0, time=7.0, values={'temperature': 0.5}, texts={}, images={})
    """
    kind = event.get("event")
    texts: dict[str, str] = {}
    images: dict[str, ImageFile] = {}
    if kind == "step":
        values = {name: event[name] for name in _OF_A_STEP if name in event}
        prefix = f"train/{event['optimizer']}/" if "optimizer" in event else "train/"
        found = {prefix + name: value for name, value in {**values, **event.get("values", {})}.items()}
    elif kind == "evaluation":
        found = {f"{event['name']}/{metric}": _value(result) for metric, result in event["values"].items()}
    elif kind == "log":
        found, texts = dict(event["values"]), dict(event.get("texts", {}))
        for name, image in event.get("images", {}).items():
            images[name] = ImageFile((folder or Path()) / image["path"], image.get("caption"))
    else:
        return None
    return Row(event.get("total_steps", step), event["epoch"], event["time"], found, texts, images)


def steps_done(event: Event, before: int) -> int:
    """Return how many steps the run has done after an event, given their number before it.

    >>> steps_done({"event": "step", "total_steps": 4}, 3), steps_done({"event": "evaluation"}, 4)
    (4, 4)
    """
    if event.get("event") == "run":
        return 0
    # A checkpoint may hold an earlier step.
    return before if event.get("event") == "checkpoint" else event.get("total_steps", before)


def _value(result: Any) -> float:
    value: float = result["value"] if isinstance(result, Mapping) else result
    return value
