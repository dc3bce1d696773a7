"""How a log of events goes on when the rank that wrote it has died: nothing is missing, and nothing told twice.

Steps and evaluations are made by all ranks together, and epochs begin and end after such calls. So each rank knows
these events, and keeps the latest ones, which a log may have held back (`held_events`). Start reading at `missing_of`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from unisono.watch.event_kinds import Event

__all__ = ["MOST_MISSING", "SHARED", "content_of", "finite", "last_shared", "missing_of", "recent_of"]

SHARED = ("epoch", "step", "evaluation", "end")
"""The kinds of events that are about calls of all ranks."""
MOST_MISSING = 512
"""The most such events that a log can lack: twice as many as may be held."""
_MISSING_S = 2.0
"""For how long events can be missing: much longer than they may be held."""

_MEASURED = ("time", "seconds", "step_s", "memory")
"""The fields in which ranks differ."""
_TAIL = 1 << 16


def content_of(event: Mapping[str, Any]) -> str:
    """Return the content of an event, which is the same on all ranks and does not change when it is read from a log.

    >>> content_of({"time": 3.5, "event": "step", "loss": float("nan"), "step_s": 0.2})
    '{"event": "step", "loss": "nan"}'
    """
    said = {key: value for key, value in event.items() if key not in _MEASURED}
    return json.dumps(finite(said), sort_keys=True, default=str)


def recent_of(events: Sequence[Event]) -> Sequence[Event]:
    """Return the latest of events that another log may lack, in their order.

    >>> [each["time"] for each in recent_of([{"time": 1.0}, {"time": 7.5}, {"time": 9.0}])]
    [7.5, 9.0]
    """
    return [event for event in events if event["time"] >= events[-1]["time"] - _MISSING_S]


def missing_of(recent: Sequence[Event], found: Event | None) -> Sequence[Event]:
    """Return the latest events of the other ranks that are missing in a log, in their order.

    Args:
        recent: The latest events that another rank knows.
        found: The last such event in the log; None: there is none.

    >>> steps = [{"time": 8.0, "event": "step", "total_steps": 5}, {"time": 8.1, "event": "step", "total_steps": 6}]
    >>> [each["total_steps"] for each in missing_of(steps, {"time": 7.9, "event": "step", "total_steps": 4})]
    [5, 6]
    >>> [each["total_steps"] for each in missing_of(steps, {"time": 8.05, "event": "step", "total_steps": 5})]
    [6]
    >>> missing_of(steps, {"time": 8.2, "event": "step", "total_steps": 7})  # of a step that is made again
    []
    """
    if found is None:
        return recent
    for number, event in reversed([*enumerate(recent, 1)]):
        if content_of(event) == content_of(found):
            return recent[number:]
    return [event for event in recent if event["time"] > found["time"]]


def last_shared(path: Path) -> dict[str, Any] | None:
    """Return the last event in a log that is about a call of all ranks; None if its end has none."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        for line in reversed(file.read().splitlines()):
            with suppress(ValueError):  # incomplete
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") in SHARED:
                    return event
    return None


def finite(value: Any) -> Any:
    """Replace floats that JSON cannot represent by their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
