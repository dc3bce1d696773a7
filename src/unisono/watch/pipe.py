"""The launcher's pipe for the events of a process that it started."""

from __future__ import annotations

import os
import stat

from unisono.variables import EVENTS_VARIABLE

__all__ = ["launcher_pipe"]


def launcher_pipe() -> int | None:
    """Return the descriptor to which rank 0 writes events; None if the launcher passed none or it is no pipe here.

    A program that rank 0 starts inherits the variable (UNISONO_EVENTS_FD) but not the pipe.
    """
    fd = os.environ.get(EVENTS_VARIABLE)
    if fd is None:
        return None
    try:
        return int(fd) if stat.S_ISFIFO(os.fstat(int(fd)).st_mode) else None
    except OSError:
        return None
