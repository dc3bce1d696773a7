"""Checks of arguments from users, with one message for each kind of mistake. Pure; accepts numbers of NumPy."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from unisono.text import a_type

__all__ = ["choice", "flag", "function", "real", "text", "whole"]


def whole(name: str, value: Any, *, least: int | None = None, meant: str = "a whole number") -> int:
    """Return an argument that is a whole number, as an int.

    Args:
        name: The name of the argument, for messages.
        value: The argument.
        least: The smallest number allowed; None allows all.
        meant: A description of the number, for messages.

    Raises:
        TypeError: The argument is not a whole number.
        ValueError: The argument is less than `least`.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}={value!r} must be {meant}, and is {a_type(value)}")
    try:
        number = operator.index(value)
    except TypeError:  # such as an array of several numbers
        raise TypeError(f"{name}={value!r} must be {meant}, and is {a_type(value)}") from None
    if least is not None and number < least:
        raise ValueError(f"{name}={number} must be at least {least}")
    return number


def real(name: str, value: Any, *, meant: str = "a number") -> float:
    """Return an argument that is a number other than NaN, as a float.

    Args:
        name: The name of the argument, for messages.
        value: The argument.
        meant: A description of the number, for messages.

    Raises:
        TypeError: The argument is not a number.
        ValueError: The argument is NaN.
    """
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name}={value!r} must be {meant}, and is {a_type(value)}")
    number = float(value)
    if math.isnan(number):
        raise ValueError(f"{name}={number!r} must be {meant}")
    return number


def flag(name: str, value: Any) -> bool:
    """Return an argument that is True or False.

    Raises:
        TypeError: The argument is anything else, such as a string, which would always count as true.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be True or False, and is {a_type(value)}")
    return value


def function(name: str, value: Any, *, meant: str = "give a function") -> None:
    """Check that an argument can be called.

    Args:
        name: The argument, for messages.
        value: The argument.
        meant: The remedy, for messages.

    Raises:
        TypeError: The argument cannot be called.
    """
    if not callable(value):
        raise TypeError(f"{name} is {a_type(value)}, which cannot be called: {meant}")


def choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    """Check that an argument is one of the allowed values.

    Raises:
        ValueError: The argument is not among them.
    """
    if not any(value is each or (isinstance(value, str) and value == each) for each in choices):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def text(name: str, value: Any) -> str:
    """Return an argument that is a string and not empty.

    Raises:
        TypeError: The argument is not a string.
        ValueError: The argument is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a text, and is {a_type(value)}")
    if not value:
        raise ValueError(f"{name}={value!r} must not be empty")
    return value
