"""Open files that the launcher has in a rank: at numbers out of a program's way, and looked at before they are used.

A program may close what it does not know (`os.closerange(3, 1000)`, as daemons do), and open files of its own at the
same numbers. Start reading at `move_out_of_the_way`.
"""

from __future__ import annotations

import fcntl
import os
import resource

__all__ = ["OwnFile", "move_out_of_the_way"]

_HIGHEST = 4096
"""No number above this is taken: the kernel's table of a process's files is as long as the highest."""
_FILES = 16
"""How many files of ours there may be."""


def move_out_of_the_way(file: int) -> int:
    """Give an open file a high number, in place of the one that it has.

    Args:
        file: Its number.

    Returns:
        Its new number, not inherited by programs; the old one if no high number is free.
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
    """An open file of the launcher, known by more than its number.

    Args:
        number: The number of the file, which is open now.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._identity = _identity(number)

    @property
    def is_intact(self) -> bool:
        """Whether the number still stands for the same file."""
        return _identity(self.number) == self._identity


def _identity(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:
        return None
    return found.st_dev, found.st_ino
