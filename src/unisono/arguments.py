"""Reading arguments that users give: one sentence for each kind of mistake. Pure; numbers of NumPy count as numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

__all__ = ["choice", "flag", "real", "text", "whole"]


def whole(name: str, value: Any, *, least: int | None = None, meant: str = "a whole number") -> int:
    """Read a whole number.

    Args:
        name: of the argument, for messages.
        value: what was given.
        least: the smallest number that is allowed; None allows all.
        meant: what the number is, for messages.

    Returns:
        The number, as an int.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be {meant}, and is a {type(value).__name__}")
    try:
        number = operator.index(value)
    except TypeError:  # such as an array of several numbers
        raise TypeError(f"{name}={value!r} must be {meant}, and is a {type(value).__name__}") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def real(name: str, value: Any, *, meant: str = "a number") -> float:
    """Read a number that is not NaN.

    Args:
        name: of the argument, for messages.
        value: what was given.
        meant: what the number is, for messages.

    Returns:
        The number, as a float.

    Raises:
        TypeError: It is no number.
        ValueError: It is NaN.
    """
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r} must be {meant}, and is a {type(value).__name__}")
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{name}={number!r} must be {meant}")
    return number


def flag(name: str, value: Any) -> bool:
    """Read True or False.

    Raises:
        TypeError: It is something else, such as a string, which would always count as true.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, and is a {type(value).__name__}")
    return value


def choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Compare an argument with what is allowed.

    Raises:
        ValueError: It is none of these.
    """
    if not any(value is each or (isinstance(value, str) and value == each) for each in choices):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def text(name: str, value: Any) -> str:
    """Read a text that is not empty.

    Raises:
        TypeError: It is no text.
        ValueError: It is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a text, and is a {type(value).__name__}")
    if not value:
        raise ValueError(f"{name}={value!r} must not be empty")
    return value
