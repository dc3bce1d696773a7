"""One run at a time in a directory: a lock that its writer holds, and that the kernel releases with the process.

The lock is flock's, on a file in the directory that names its holder. flock belongs to the open file and not to the
process, so other readers of the directory in this process do no harm. Forked children close the inherited file, so that
a worker which outlives its parent for a moment does not keep the lock. Start reading at `DirectoryLock.acquire`.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from unisono.errors import CheckpointError
from unisono.state.durable_files import run_in_children

__all__ = ["DirectoryLock"]

# The launcher sees the end of a killed process a moment before the kernel has closed its files.
_PATIENCE_S = 3.0
_POLL_S = 0.05

_holders: weakref.WeakValueDictionary[tuple[int, int], DirectoryLock] = weakref.WeakValueDictionary()
"""Locks that this process holds, by device and inode of the file."""


class DirectoryLock:
    """Prevents other processes from using the same directory for a run. A later lock of this process takes it over."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None
        self._close: weakref.finalize[[int], DirectoryLock] | None = None
        self.lost = False
        """True once another lock of this process has taken over."""
        self.settle: Callable[[], object] | None = None
        """Called before another lock of this process takes over, to finish a write."""

    @property
    def is_held(self) -> bool:
        """True if this lock is held."""
        return self._handle is not None

    def acquire(self) -> str | None:
        """Acquire the lock, also from another lock of this process; wait up to `_PATIENCE_S` for another process.

        Returns:
            A warning if the file system has no locks, so that nothing is locked; None otherwise.

        Raises:
            CheckpointError: Another process holds the lock; the message names it.
            OSError: The directory cannot be used.
        """
        end_s, warning = time.monotonic() + _PATIENCE_S, None
        while True:
            handle = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            status = os.fstat(handle)
            before = _holders.pop((status.st_dev, status.st_ino), None)
            if before is not None:
                if before.settle is not None:
                    before.settle()
                before.release()
                before.lost = True
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(handle, 1000, 0)
                os.close(handle)
            except OSError as error:
                warning = (
                    f"{self._folder} is on a file system without locks ({error.strerror}): nothing would notice a "
                    "second job that keeps its run there at the same time."
                )
                break
            if time.monotonic() >= end_s:
                raise CheckpointError(
                    f"{self._folder} is in use: {_name(holder)} keeps its run there. Wait for it or end it, or give "
                    "this job another directory."
                )
            time.sleep(_POLL_S)
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}).encode() + b"\n"
        os.ftruncate(handle, 0)
        os.pwrite(handle, text, 0)
        run_in_children(_release_all)
        self._handle, self._close, self.lost = handle, weakref.finalize(self, os.close, handle), False
        _holders[status.st_dev, status.st_ino] = self
        return warning

    def release(self) -> None:
        """Release the lock. May be called again."""
        if self._close is not None:
            self._close()
        self._handle = self._close = None


def _name(holder: bytes) -> str:
    """Return a description of a lock's holder, from the content of the lock file."""
    try:
        found = json.loads(holder)
        return f"process {found['pid']} on {found['host']}, since {found['since']},"
    except (ValueError, TypeError, KeyError):  # it is being written
        return "another process"


def _release_all() -> None:
    """Close inherited lock files in a forked child. The locks of its parents stay."""
    for lock in list(_holders.values()):
        lock.release()
    _holders.clear()
