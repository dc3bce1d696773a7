"""How a log of events goes on when the rank that wrote it has died: nothing is missing, and nothing told twice.

Steps and evaluations are made by all ranks together, and epochs begin and end after such calls, so each rank knows the
latest of these events. Start reading at `is_missing`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["SHARED", "content_of", "finite", "is_missing", "last_shared"]

SHARED = ("epoch", "step", "evaluation", "end")
"""The kinds of events that are about calls of all ranks, of which at most the last one is missing."""

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


def is_missing(latest: Mapping[str, Any], found: Mapping[str, Any] | None) -> bool:
    """Return True if the latest event of the other ranks is missing in a log.

    Args:
        latest: The latest event that another rank knows.
        found: The last such event in the log; None: there is none.

    >>> step = {"time": 8.0, "event": "step", "total_steps": 5}
    >>> is_missing(step, {"time": 7.9, "event": "step", "total_steps": 4})
    True
    >>> is_missing(step, {"time": 7.9, "event": "step", "total_steps": 5})
    False
    >>> is_missing(step, {"time": 8.1, "event": "step", "total_steps": 6})  # of a step that is made again
    False
    """
    if found is None:
        return True
    return content_of(found) != content_of(latest) and found["time"] < latest["time"]


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
