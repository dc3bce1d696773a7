"""Where the events of a run go: its directory, the launcher that asked for them, or else this process's own display."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from unisono.watch import EventLog, Progress

__all__ = ["open_log"]


def open_log(directory: Path | None, *, is_main: bool, progress: bool) -> EventLog:
    """Open the event log of a run on rank 0; on other ranks, one that drops everything.

    Progress is drawn by the launcher if it passed a pipe (UNISONO_EVENTS_FD), else here, on standard error.
    """
    if not is_main:
        return EventLog()
    path = None if directory is None else directory / "events.jsonl"
    fd = os.environ.get("UNISONO_EVENTS_FD")
    if not progress:
        return EventLog(path)
    if fd is not None and _is_pipe(int(fd)):
        return EventLog(path, fd=int(fd))
    return EventLog(path, listeners=[Progress(sys.stderr).handle])


def _is_pipe(fd: int) -> bool:
    """Whether the launcher's pipe is open here: a program that rank 0 starts inherits the variable but not the pipe."""
    try:
        return stat.S_ISFIFO(os.fstat(fd).st_mode)
    except OSError:
        return False
