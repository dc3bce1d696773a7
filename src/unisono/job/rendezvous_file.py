"""The end of a file at which ranks have met."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["one_at_a_time"]

_TIMEOUT_S = 5.0
_POLL_S = 0.002


@contextmanager
def one_at_a_time(file: Path | None) -> Iterator[None]:
    """Let no other rank let go of its store in a file at the same time. Within a context; None: there is no file.

    Of torch's stores in a file the last one removes it. Each counts in two steps, so that of two that end at the same
    time none may be the last one; the file then stays, and the next job at its path does not begin.

    Where folders cannot be locked, as on some network file systems, and after 5 s, ranks do not wait for each other.
    """
    folder = -1
    try:
        if file is not None:
            folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
            _lock(folder)
    except OSError:
        pass  # the file may stay
    try:
        yield
    finally:
        if folder >= 0:
            os.close(folder)


def _lock(folder: int) -> None:
    end_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < end_s:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        else:
            return
