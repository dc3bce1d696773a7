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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.machine import read_ahead
from unisono.state.digest import exact, memory
from unisono.state.regions import CHUNK, FileEntry, Region, RegionHashes, chunks, region_nbytes
from unisono.state.safetensors_format import FilePart

__all__ = [
    "CheckedFile",
    "check_hash",
    "explained",
    "failing_with_remedy",
    "flush_folder",
    "is_locked",
    "locked",
    "make_folder",
    "nbytes_of",
    "open_file",
    "read_file",
    "remedy",
    "run_in_children",
    "swap_names",
    "write_file",
]

# From linux/fcntl.h and linux/fs.h.
_AHEAD_NBYTES = 8 << 20
"""The bytes of a tensor that are asked for together, if it is in a mapped file."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_file(path: Path, pieces: list[FilePart]) -> FileEntry:
    """Write a file, flush it to the disk, and return its entry.

    The hashes are those of the bytes in memory, taken while they are written. A hash of the file would confirm a bad
    write,
    and reading it back would read the page cache: 0.15 s for 300 MB, without a check of the disk.
    `CheckpointStore.verify` checks that later.
    """
    hashes = RegionHashes(region_nbytes(nbytes_of(pieces)))
    nbytes = 0
    with path.open("xb") as file:
        for piece in pieces:
            plain = None
            if isinstance(piece, bytes):
                view = memoryview(piece)
            else:
                plain = exact(piece[1], piece[0])
                view = memory(plain)
            done = 0
            for chunk in chunks(view, hashes):
                if plain is not None and len(view) > _AHEAD_NBYTES and done % _AHEAD_NBYTES < len(chunk):
                    read_ahead(plain.data_ptr() + done, min(2 * _AHEAD_NBYTES, len(view) - done))
                file.write(chunk)
                hashes.add(chunk)
                done += len(chunk)
            nbytes += len(view)
        file.flush()
        os.fsync(file.fileno())
    found = path.stat().st_size
    if found != nbytes:
        raise OSError(errno.EIO, f"{nbytes:,} bytes were written and the file has {found:,}", str(path))
    return FileEntry(name=path.name, nbytes=nbytes, regions=hashes.finish())


def nbytes_of(pieces: Iterable[FilePart]) -> int:
    """Return the size of parts of a file, in bytes."""
    return sum(len(each) if isinstance(each, bytes) else each[1].numel() * each[1].element_size() for each in pieces)


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
"""Files by which this process holds locks."""


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
def locked(path: Path) -> Iterator[None]:
    """Hold a lock on a folder or a file while its writer runs.

    A process id would not do: containers reuse it at each start.
    """
    run_in_children(_release_all)
    # NFS locks no file for writing that is open for reading alone; a folder can only be opened for that.
    handle = os.open(path, (os.O_RDONLY if path.is_dir() else os.O_RDWR) | os.O_CLOEXEC)
    _held.add(handle)
    try:
        with suppress(OSError):  # no locks on this file system: `clean` then assumes that there is one writer
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        _held.discard(handle)
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Return True if a process holds the lock of a folder or a file."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
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
    """A file whose bytes are compared with its hashes while it is read, from its first byte to its last.

    Raises:
        CorruptCheckpointError: The path is no file, has a wrong size, cannot be read or is damaged; here and in all
            methods.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self._path, self._entry = path, entry
        self._regions = iter(entry.regions)
        self._region, self._sha = next(self._regions), hashlib.sha256()
        self._at = 0
        expected = f"{entry.nbytes:,} bytes"
        with explained(path, expected):
            self._file = open_file(path, lambda size: size == entry.nbytes, expected)

    def read(self, view: memoryview) -> None:
        """Fill a view with the next bytes; ValueError if fewer are left."""
        left = self._entry.nbytes - self._at
        if len(view) > left:
            raise ValueError(f"{len(view):,} bytes were asked for, and {left:,} are left")
        with explained(self._path, f"{self._entry.nbytes:,} bytes"):
            while view:
                chunk = view[: min(CHUNK, self._region.stop - self._at)]
                filled = 0
                while filled < len(chunk):
                    found = self._file.readinto(chunk[filled:])
                    if not found:
                        raise OSError(errno.EIO, "the file ended early")
                    filled += found
                self._sha.update(chunk)
                self._at += len(chunk)
                if self._at == self._region.stop:
                    self._check()
                view = view[len(chunk) :]

    def finish(self) -> None:
        """Read the rest of the file, and compare it, too."""
        rest = memoryview(bytearray(min(self._entry.nbytes - self._at, CHUNK)))
        while self._at < self._entry.nbytes:
            self.read(rest[: self._entry.nbytes - self._at])
        if not self._entry.nbytes:
            self._check()

    def _check(self) -> None:
        """Compare the region that has been read, and go to the next one that is not empty."""
        check_hash(self._path, self._entry, self._region, self._sha.hexdigest())
        self._sha = hashlib.sha256()
        self._region = next((each for each in self._regions if each.stop > each.start), self._region)

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def check_hash(path: Path, entry: FileEntry, region: Region, found: str) -> None:
    """Compare the hash of the bytes of a region with the expected one.

    Raises:
        CorruptCheckpointError: They differ.
    """
    if found != region.sha256:
        where = f"{entry.nbytes:,} bytes" if len(entry.regions) == 1 else region.told()
        raise CorruptCheckpointError(
            f"{path}: expected sha256 {region.sha256}, found {found} in {where}: the file was changed or the disk is "
            "failing. Take an older checkpoint."
        )


def read_file(path: Path, fits: Callable[[int], bool], expected: str) -> bytes:
    """Return the bytes of a file.

    Args:
        path: The path of the file.
        fits: Returns True if a size in bytes is right.
        expected: The right size, in words.

    Raises:
        CorruptCheckpointError: The path is no file, has a wrong size or cannot be read.
    """
    with explained(path, expected), open_file(path, fits, expected) as file:
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
def explained(path: Path, expected: str) -> Iterator[None]:
    """Raise CorruptCheckpointError for an OSError inside, while a file is read."""
    try:
        yield
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path}: expected {expected}, but it cannot be read: [Errno {error.errno}] {error.strerror}. Take an "
            f"older checkpoint, or repair this one."
        ) from error
