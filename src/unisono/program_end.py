"""The exception that ends the program of this process, for what is recorded when the process ends.

Python keeps it in `sys.last_value`, but not SystemExit, nor the exception of a rank that a launcher shows. Those are
noted here, as texts: keeping the exception would keep the program's frames alive. Start reading at `ending`.
"""

from __future__ import annotations

import sys
from types import CodeType, TracebackType
from typing import NamedTuple

__all__ = ["ProgramEnd", "describe_exception", "ending", "note_exception", "note_signal"]

_LONGEST = 300
"""Characters of a message."""


class ProgramEnd(NamedTuple):
    """The end of a program, and its cause."""

    kind: str
    """The name of the exception's type, or of the signal, such as "SIGTERM"."""
    message: str
    """The first line of its message; may be empty."""
    places: frozenset[tuple[CodeType, int]] = frozenset()
    """The code and the line of each frame that the exception has left; none for a signal."""


_noted: list[ProgramEnd] = []


def note_exception(error: BaseException) -> None:
    """Note the exception that ends the program; for who runs the program and catches it."""
    if not (_noted and isinstance(error, SystemExit)):  # it is how a signal ends a program
        _noted[:] = [describe_exception(error)]


def note_signal(name: str, message: str) -> None:
    """Note that a signal ends the program."""
    _noted[:] = [ProgramEnd(name, message)]


def ending() -> ProgramEnd | None:
    """Return what ends the program; None as long as nothing does, and if it ends well."""
    if _noted:
        return _noted[0]
    shown = getattr(sys, "last_value", None)
    return describe_exception(shown) if isinstance(shown, BaseException) else None


def describe_exception(error: BaseException) -> ProgramEnd:
    """Return what an exception that ends a program tells."""
    try:
        message = str(error)
    except Exception:  # the program's own code
        message = ""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return ProgramEnd(type(error).__qualname__, first[:_LONGEST], frozenset(_places(error.__traceback__)))


def _places(trace: TracebackType | None) -> list[tuple[CodeType, int]]:
    found = []
    while trace is not None:
        found.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return found
