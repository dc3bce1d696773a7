"""Where the events of a run go: its directory, the launcher that asked for them, or else this process's own display."""

from __future__ import annotations

import sys
from pathlib import Path

from unisono.watch import EventLog, Progress
from unisono.watch.pipe import launcher_pipe

__all__ = ["open_log"]


def open_log(directory: Path | None, *, is_main: bool, progress: bool) -> EventLog:
    """Open the event log of a run on rank 0; on other ranks, one that drops everything.

    Progress is drawn by the launcher if it passed a pipe (UNISONO_EVENTS_FD), else here, on standard error.
    """
    if not is_main:
        return EventLog()
    path = None if directory is None else directory / "events.jsonl"
    if not progress:
        return EventLog(path)
    fd = launcher_pipe()
    if fd is not None:
        return EventLog(path, fd=fd)
    return EventLog(path, listeners=[Progress(sys.stderr).handle])
