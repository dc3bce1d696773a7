"""Shared memory in a file without a name, for data that may be larger than memory: the kernel writes its pages back.

The file is in a folder's file system but in no folder, so two runs never meet, nothing can cut it off, and it is gone
when the last process that has it ends, however that happens. Like other segments, processes share it by its descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from pathlib import Path

from unisono.shm.segment import Segment, aligned

__all__ = ["reserve", "unnamed_file"]

_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
"""The answers of file systems without O_TMPFILE, and of kernels without it."""


def unnamed_file(folder: Path, nbytes: int) -> Segment:
    """Create a file without a name that is all zero, and map it. Nothing is allocated before `reserve`, or a write.

    Args:
        folder: Says in which file system.
        nbytes: The size, rounded up as by `Segment.create`.

    Raises:
        OSError: It cannot be made.
        UnisonoError: It cannot be mapped into this process.
    """
    fd = _open(folder)
    try:
        os.ftruncate(fd, max(aligned(nbytes), mmap.PAGESIZE))
    except OSError:
        os.close(fd)
        raise
    return Segment(fd)


def reserve(segment: Segment, nbytes: int | None = None, *, start: int = 0) -> None:
    """Allocate the space of a file on its disk, so that no later write to the mapping finds the disk full: that would
    end the process by SIGBUS. What is allocated already stays as it is. Data is not written.

    Args:
        segment: What `unnamed_file` has returned.
        nbytes: How many bytes from `start` on; None: all.
        start: The first one.

    Raises:
        OSError: There is no room, or the file system cannot do this.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Not os.posix_fallocate, which writes to every block where the file system has no such call.
    count = segment.nbytes - start if nbytes is None else nbytes
    while libc.fallocate(segment.fd, 0, ctypes.c_int64(start), ctypes.c_int64(count)):
        if (number := ctypes.get_errno()) != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _open(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE or not folder.is_dir():
            raise
    fd, name = tempfile.mkstemp(prefix=".unisono-", dir=folder)
    try:
        Path(name).unlink()
    except OSError:
        os.close(fd)
        raise
    return fd
