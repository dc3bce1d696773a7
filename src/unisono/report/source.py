"""A run on disk: its events, and what can be told of it without disturbing it. Start reading at `open_run`."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from pathlib import Path

from unisono.errors import ReportError
from unisono.report.summary import Document, summarise
from unisono.watch import read_events

__all__ = ["events_of", "is_running", "open_run"]

_EVENTS = "events.jsonl"


def open_run(path: Path) -> Document:
    """Return the summary of a run, which may still be going on.

    The events are read once, line by line, in memory that does not depend on their number; about 20 µs for each.

    Args:
        path: The directory of the run, or its events.jsonl.

    Raises:
        ReportError: There is no run, or its events cannot be read.
    """
    path = events_of(path)
    try:
        document = summarise(read_events(path))
    except OSError as error:
        raise ReportError(f"{path} cannot be read: {error.strerror}") from error
    if document["totals"]["events"] == 0:
        raise ReportError(f"{path} holds no event of a run: give the directory of a Trainer(directory=...)")
    folder = path.parent
    document["title"] = folder.resolve().name or str(folder)
    document["source"] = str(path)
    document["made"] = round(time.time(), 3)
    if document["state"] == "open":
        document["state"] = "running" if is_running(folder) else "stopped"
    return document


def events_of(path: Path) -> Path:
    """Return the file with the events of a run.

    Args:
        path: The directory of the run, or the file itself.

    Raises:
        ReportError: There is none.
    """
    file = path / _EVENTS if path.is_dir() else path
    try:
        status = file.stat()
    except OSError as error:
        if not path.exists():
            raise ReportError(
                f"{path} does not exist: give the directory of a run, as in Trainer(directory=...)"
            ) from error
        runs = sorted(each.parent.name for each in path.glob(f"*/{_EVENTS}")) if path.is_dir() else []
        advice = (
            f"it holds runs, so give one of them, such as {path / runs[0]}"
            if runs
            else "give the directory of a run, as in Trainer(directory=...)"
        )
        raise ReportError(f"{path} is no run: it has no {_EVENTS}; {advice}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ReportError(f"{file} is no file; give the directory of a run, as in Trainer(directory=...)")
    return file


def is_running(folder: Path) -> bool:
    """Return True if a process has its run in a directory now.

    A run locks the file `lock` there. Trying that lock disturbs nothing: it is released at once, and a run that begins
    at this moment tries again.
    """
    try:
        handle = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False
