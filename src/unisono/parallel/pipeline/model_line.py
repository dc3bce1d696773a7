"""The line of a model's code at which something happens, for messages."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType, TracebackType

import torch

__all__ = ["model_line", "model_line_of"]

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def model_line() -> str:
    """Return the file, line and function of the user's code that called torch, as "file:line in function"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def model_line_of(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of an error, as `model_line` does."""
    line = "an unknown line"
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if _is_users(code.co_filename):
            line = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return line


def _is_users(path: str) -> bool:
    if path.startswith("<"):
        return path in {"<string>", "<stdin>"}
    if path.startswith(_NOT_THE_USERS):
        return False
    # Installed packages, whose models may be cut, lie below the standard library's folder.
    return not path.startswith(_STANDARD_LIBRARY) or "site-packages" in path
