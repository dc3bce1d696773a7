"""Files of a checkpoint on disk: written so that they survive a power cut, read so that damage is always detected.

Independent of their content. Start reading at `write_file` and `CheckedFile`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.digest import exact, memory
from unisono.state.safetensors_format import FilePart

__all__ = [
    "CheckedFile",
    "FileEntry",
    "failing_with_remedy",
    "flush_folder",
    "is_locked",
    "locked",
    "make_folder",
    "read_file",
    "remedy",
    "run_in_children",
    "swap_names",
    "write_file",
]

# From linux/fcntl.h and linux/fs.h.
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# A chunk stays in the CPU's cache between being written and being hashed: one pass over memory, not two.
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """The expected name, size and hash of a file."""

    name: str
    nbytes: int
    sha256: str


def write_file(path: Path, pieces: list[FilePart]) -> FileEntry:
    """Write a file, flush it to the disk, and return its entry.

    The hash is that of the bytes in memory, taken while they are written. A hash of the file would confirm a bad write,
    and reading it back would read the page cache: 0.15 s for 300 MB, without a check of the disk.
    `CheckpointStore.verify` checks that later.
    """
    sha = hashlib.sha256()
    nbytes = 0
    with path.open("xb") as file:
        for piece in pieces:
            view = memoryview(piece) if isinstance(piece, bytes) else memory(exact(piece[1], piece[0]))
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                file.write(chunk)
                sha.update(chunk)
            nbytes += len(view)
        file.flush()
        os.fsync(file.fileno())
    found = path.stat().st_size
    if found != nbytes:
        raise OSError(errno.EIO, f"{nbytes:,} bytes were written and the file has {found:,}", str(path))
    return FileEntry(name=path.name, nbytes=nbytes, sha256=sha.hexdigest())


def make_folder(folder: Path) -> None:
    """Make a folder and the missing ones above it, and flush their names to the disk."""
    missing = list(takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        flush_folder(each.parent)


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network and FUSE file systems report that they cannot flush a folder; nothing more can be done there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def swap_names(first: Path, second: Path) -> bool:
    """Swap two names in one step, so that at no moment either is missing. Return False if that is not possible here."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:  # a C library without it
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):  # a file system or a kernel without it, such as NFS
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


_held: set[int] = set()
"""Files by which this process holds locks on folders."""


@functools.cache  # a registration is for good
def run_in_children(function: Callable[[], None]) -> None:
    """Call a function in forked children, such as workers; once, however often it is given."""
    os.register_at_fork(after_in_child=function)


def _release_all() -> None:
    """Close inherited locks: a child that outlives the writer would keep them."""
    for handle in _held:
        os.close(handle)
    _held.clear()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder while its writer runs. A process id would not do: containers reuse it at each start."""
    run_in_children(_release_all)
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    _held.add(handle)
    try:
        with suppress(OSError):  # no locks on this file system: `clean` then assumes that there is one writer
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Return True if a process holds the lock of a folder."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def remedy(error: OSError, folder: Path) -> str:
    """Return advice on an error while writing into a folder."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space or quota there, keep fewer checkpoints, or choose another directory."
    if error.errno == errno.EFBIG:
        return "Raise the limit on file sizes (`ulimit -f`), or choose a file system that holds files of this size."
    if error.errno == errno.EROFS:
        return "The file system is mounted read-only: choose another directory, or mount it for writing."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Give uid {os.geteuid()} the right to write there, or choose another directory."
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return (
            f"A file is where a folder must be ({error.filename or folder}): move it away, or choose another directory."
        )
    return "Look at the disk and its mount, or choose another directory."


@contextmanager
def failing_with_remedy(folder: Path, what: str, *, note: str = "") -> Iterator[None]:
    """Raise CheckpointError for an OSError inside.

    Args:
        folder: The folder that is written to.
        what: What was not done, for the message.
        note: A sentence about what is unchanged.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error}. {note}{remedy(error, folder)}") from error


class CheckedFile:
    """A file that is hashed while it is read, from its first byte to its last.

    Raises:
        CorruptCheckpointError: The path is no file, has a wrong size or cannot be read; here and in all methods.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self._path, self._entry = path, entry
        self._sha = hashlib.sha256()
        self._left = entry.nbytes
        expected = f"{entry.nbytes:,} bytes"
        with _explained(path, expected):
            self._file = open_file(path, lambda size: size == entry.nbytes, expected)

    def read(self, view: memoryview) -> None:
        """Fill a view with the next bytes; ValueError if fewer are left."""
        if len(view) > self._left:
            raise ValueError(f"{len(view):,} bytes were asked for, and {self._left:,} are left")
        with _explained(self._path, f"{self._entry.nbytes:,} bytes"):
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                filled = 0
                while filled < len(chunk):
                    found = self._file.readinto(chunk[filled:])
                    if not found:
                        raise OSError(errno.EIO, "the file ended early")
                    filled += found
                self._sha.update(chunk)
        self._left -= len(view)

    def finish(self) -> None:
        """Read the rest of the file, and compare the hash of all bytes with the expected one."""
        rest = memoryview(bytearray(min(self._left, _CHUNK)))
        while self._left:
            self.read(rest[: self._left])
        if self._sha.hexdigest() != self._entry.sha256:
            raise CorruptCheckpointError(
                f"{self._path}: expected sha256 {self._entry.sha256}, found {self._sha.hexdigest()} in "
                f"{self._entry.nbytes:,} bytes: the file was changed or the disk is failing. Take an older checkpoint."
            )

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_file(path: Path, fits: Callable[[int], bool], expected: str) -> bytes:
    """Return the bytes of a file.

    Args:
        path: The path of the file.
        fits: Returns True if a size in bytes is right.
        expected: The right size, in words.

    Raises:
        CorruptCheckpointError: The path is no file, has a wrong size or cannot be read.
    """
    with _explained(path, expected), open_file(path, fits, expected) as file:
        return file.readall()


def open_file(path: Path, fits: Callable[[int], bool], expected: str) -> io.FileIO:
    """Open a file for reading, with the checks of `read_file`. It does not convert an OSError."""
    # Without O_NONBLOCK a named pipe in the folder would wait for a writer for ever.
    file = io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and fits(status.st_size):
        return file
    file.close()
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError(f"{path}: expected a file, found {stat.filemode(status.st_mode)}.")
    raise CorruptCheckpointError(
        f"{path}: expected {expected}, found {status.st_size:,}: it was cut off or changed. Take an older checkpoint."
    )


@contextmanager
def _explained(path: Path, expected: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path}: expected {expected}, but it cannot be read: [Errno {error.errno}] {error.strerror}. Take an "
            f"older checkpoint, or repair this one."
        ) from error
