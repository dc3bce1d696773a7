"""The launcher's open files in a rank: at numbers out of a program's way, and checked before they are used.

A program may close files that it does not know (`os.closerange(3, 1000)`, as daemons do), and open its own at the same
numbers. Start reading at `move_out_of_the_way`.
"""

from __future__ import annotations

import fcntl
import os
import resource

__all__ = ["OwnFile", "move_out_of_the_way"]

_HIGHEST = 4096
"""No number above this is used: the kernel's table of a process's files is as long as the highest number."""
_FILES = 16
"""The number of files that the launcher may have in a rank."""


def move_out_of_the_way(file: int) -> int:
    """Move an open file from its number to a high one.

    Args:
        file: The file's number.

    Returns:
        The new number, not inherited by programs; the old one if it is high already, or no high number is free.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    first = (_HIGHEST if limit == resource.RLIM_INFINITY else min(limit, _HIGHEST)) - _FILES
    if file >= first:
        return file
    try:
        moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, first)
    except OSError:
        return file
    os.close(file)
    return moved


class OwnFile:
    """An open file of the launcher, identified by device and inode besides its number.

    Args:
        number: The number of the file, which is open now.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._identity = _identity(number)

    @property
    def is_intact(self) -> bool:
        """True if the number still refers to the same file."""
        return _identity(self.number) == self._identity


def _identity(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino
