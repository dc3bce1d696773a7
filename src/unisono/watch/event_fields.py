"""Fields of events for the display, which any program may have written: what is not of the type expected is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["number_in", "whole_in"]


def number_in(fields: Mapping[str, Any], key: str) -> float | None:
    """Return a field that is a number, otherwise None; in a log, a number that is not finite is a text.

    >>> number_in({"loss": "inf"}, "loss"), number_in({"loss": "low"}, "loss"), number_in({}, "loss")
    (inf, None, None)
    """
    value = fields.get(key)
    if isinstance(value, (int, float)):
        return value
    return float(value) if value in ("nan", "inf", "-inf") else None


def whole_in(fields: Mapping[str, Any], key: str) -> int | None:
    """Return a field that is a whole number, otherwise None."""
    value = fields.get(key)
    return value if isinstance(value, int) else None
