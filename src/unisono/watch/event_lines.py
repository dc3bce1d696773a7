"""Events as lines of JSON. Start reading at `event_lines`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from unisono.text import a_type
from unisono.watch.continuation import finite
from unisono.watch.event_kinds import Event
from unisono.watch.step_record import StepRecord, event_of, line_of

__all__ = ["event_lines"]


def event_lines(events: Sequence[Event | StepRecord]) -> bytes:
    r"""Return a line for each event. Floats that JSON does not have become their names.

    Raises:
        TypeError: JSON cannot represent a field, such as a tensor.

    >>> event_lines([{"time": 1.5, "event": "step"}, {"time": 2.5, "event": "step", "loss": float("nan")}])
    b'{"time":1.5,"event":"step"}\n{"time":2.5,"event":"step","loss":"nan"}\n'
    """
    return "".join([_line(event) for event in events]).encode("ascii")


def _line(event: Event | StepRecord) -> str:
    if isinstance(event, tuple):
        line = line_of(event)
        if line is not None:
            return line
        event = event_of(event)
    try:
        return _encode(event) + "\n"
    except ValueError:
        return _encode(finite(event)) + "\n"


def _say(value: object) -> str:
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    raise TypeError(
        f"a field of an event is {a_type(value)}, which JSON cannot say; pass a number (`.item()` of a "
        f"tensor), a text, a list or a dict"
    )


# Built once: json.dumps with options builds one per call. ASCII, so that a path with undecodable bytes can be written.
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_say).encode
