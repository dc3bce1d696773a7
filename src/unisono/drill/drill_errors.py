"""How a drill ends before its end."""

from __future__ import annotations

from unisono.errors import UnisonoError

__all__ = ["DrillFailedError", "NoDrillError"]


class DrillFailedError(UnisonoError):
    """The drill has failed.

    Args:
        reason: What happened, without a full stop.
        report: What the run that failed has printed; "" for nothing.
    """

    def __init__(self, reason: str, report: str = "") -> None:
        super().__init__(reason)
        self.report = report


class NoDrillError(UnisonoError):
    """There can be no drill of this script, or not this one."""
