"""Writing of a checkpoint by several ranks: each writes its ranges of the files, and rank 0 completes it.

Ranks talk by files in the folder that is written, so a thread can write while training uses the collectives. Each rank
holds a lock there as long as it writes, and leaves a report at the end, the hashes of what it has written. After an
error, it renames its lock, for which also a full disk has room. A rank whose lock is free and that has left no report
has died; one without a lock has not come yet. Start reading at `PartWriter` and `await_parts`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from unisono.errors import CheckpointError
from unisono.state.digest import exact, memory
from unisono.state.durable_files import locked
from unisono.state.regions import FileEntry, Region, RegionHashes, chunks, region_nbytes
from unisono.state.safetensors_format import FileLayout

__all__ = ["FileRange", "PartWriter", "PartsError", "await_parts", "is_begun_by"]

POLL_S = 0.02
"""Seconds between two looks at what others have done."""
_ERROR = ".errno-"
"""What follows the name of a rank that could not write its part, before the number of the error."""
_PATIENCE_S = 60.0
"""Seconds for which rank 0 waits for a rank to begin, and a process that ends otherwise for what others have begun."""
_BEGINNING_S = 3.0
"""Seconds for which a process that ends otherwise waits for a rank to begin."""


class FileRange(NamedTuple):
    """Bytes that a rank writes into a file."""

    file: str
    start: int
    data: bytes | Tensor


class PartsError(CheckpointError):
    """A rank has not written its part.

    Args:
        message: What happened.
        number: The error of the system, if it is known.
    """

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.number = number


class PartWriter:
    """Writes the part of one rank.

    Args:
        work: The folder of the checkpoint that is written.
        rank: This rank.

    Raises:
        FileNotFoundError: The folder cannot be seen from here.
        OSError: It cannot be written to.
    """

    def __init__(self, work: Path, rank: int) -> None:
        self._work, self._rank = work, rank
        self._lock = ExitStack()
        path = _lock_path(work, rank)
        new = path.with_suffix(".new")
        new.touch(exist_ok=False)
        self._lock.enter_context(locked(new))
        new.rename(path)  # so that nobody sees the lock while it is free

    def write(self, ranges: Sequence[FileRange], files: Mapping[str, FileLayout]) -> None:
        """Write and flush ranges of files, and report. An error is reported, too, and not raised.

        Args:
            ranges: The ranges. They do not overlap.
            files: The layout of each file.
        """
        try:
            try:
                content = {
                    name: [_mark_of(layout), self._write_file(name, ranges, layout.nbytes)]
                    for name, layout in files.items()
                }
                _write_report(self._work, self._rank, content)
            except OSError as error:
                lock = _lock_path(self._work, self._rank)
                with suppress(FileNotFoundError):  # rank 0 has given up, and the folder is gone
                    lock.rename(lock.with_suffix(f"{_ERROR}{error.errno or 0}"))
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock of this rank."""
        self._lock.close()

    def _write_file(self, name: str, ranges: Sequence[FileRange], size: int) -> list[tuple[int, int, str]]:
        own = sorted((each for each in ranges if each.file == name), key=lambda each: each.start)
        if not own:
            return []
        regions: list[Region] = []
        hashes: RegionHashes | None = None
        stop = 0
        handle = os.open(self._work / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            for each in own:
                view = memoryview(each.data) if isinstance(each.data, bytes) else memory(exact(each.data, name))
                if hashes is None or each.start != stop:
                    regions += hashes.finish() if hashes is not None else ()
                    hashes, stop = RegionHashes(region_nbytes(size), start=each.start), each.start
                for chunk in chunks(view, hashes):
                    _write_at(handle, chunk, stop)
                    hashes.add(chunk)
                    stop += len(chunk)
            os.fsync(handle)
        finally:
            os.close(handle)
        regions += hashes.finish() if hashes is not None else ()
        return [(start, stop, sha256) for start, stop, sha256, _ in regions]


def is_begun_by(work: Path, ranks: int) -> bool:
    """Return True if all ranks have begun to write to a folder: their files are seen from here."""
    return all(_lock_path(work, rank).exists() for rank in range(ranks))


def await_parts(
    work: Path,
    ranks: Sequence[int],
    files: Mapping[str, FileLayout],
    *,
    gives_up: Callable[[bool], str] = lambda _is_begun: "",
) -> list[FileEntry]:
    """Wait until all ranks have written their parts, and return the entries of the files.

    It ends soon after a rank has died; otherwise a minute after it began to wait for one that has not begun to write,
    or three seconds after the program of this process has ended, and a minute after that in any case.

    Args:
        work: The folder of the checkpoint that is written.
        ranks: The ranks that write.
        files: The layout of each file.
        gives_up: Returns why to wait no longer for a rank that has begun to write (True), or that has not: words that
            follow "had not written its part". "" to wait. Called in this thread.

    Raises:
        PartsError: A rank could not write its part, or has died; or parts are missing.
    """
    regions: dict[str, list[Region]] = {name: [] for name in files}
    wait = _Waiting(work, gives_up)
    for rank in ranks:
        content = wait.for_report(rank)
        for name, layout in files.items():
            mark, own = content[name]
            if mark != _mark_of(layout):
                raise PartsError(f"rank {rank} has other tensors than rank 0 for {name}")
            regions[name] += [Region(start, stop, sha256, rank) for start, stop, sha256 in own]
    entries = []
    for name, size in ((name, layout.nbytes) for name, layout in files.items()):
        found = sorted(regions[name], key=lambda each: each.start)
        reached = 0
        for each in found:
            if each.start != reached:
                break
            reached = each.stop
        on_disk = (work / name).stat().st_size
        if reached != size or on_disk != size:
            raise PartsError(
                f"the parts of {name} end at {reached:,} and the file has {on_disk:,} bytes, expected {size:,}"
            )
        entries.append(FileEntry(name=name, nbytes=size, regions=tuple(found)))
    for rank in ranks:
        for path in (_lock_path(work, rank), _report_path(work, rank)):
            path.unlink(missing_ok=True)
    return entries


class _Waiting:
    """Waits for the reports of ranks.

    Args:
        work: The folder of the checkpoint that is written.
        gives_up: See `await_parts`.
    """

    def __init__(self, work: Path, gives_up: Callable[[bool], str]) -> None:
        self._work, self._gives_up = work, gives_up
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        """When the program of this process was first seen to have ended."""

    def for_report(self, rank: int) -> dict[str, tuple[str, list[tuple[int, int, str]]]]:
        """Return the report of a rank.

        Raises:
            PartsError: There will be none.
        """
        lock, report = _lock_path(self._work, rank), _report_path(self._work, rank)
        while True:
            # A network file system answers from its cache where a name is looked up that was not there.
            names = {path.name for path in self._work.iterdir()}
            for name in names:
                if name.startswith(lock.stem + _ERROR):
                    number = int(name.rpartition("-")[2])
                    what = f"[Errno {number}] {os.strerror(number)}"
                    raise PartsError(f"rank {rank} could not write its part: {what}", number)
            is_begun = lock.name in names
            is_free = is_begun and _is_free(lock)  # before the report is looked for: it comes before the lock is free
            with suppress(FileNotFoundError):
                found: dict[str, tuple[str, list[tuple[int, int, str]]]] = json.loads(report.read_bytes())
                return found
            if is_free:
                raise PartsError(f"rank {rank} ended before it had written its part")
            if reason := self._gives_up(is_begun):
                raise PartsError(f"rank {rank} had not written its part {reason}")
            if not is_begun and time.monotonic() - self._began_s > _PATIENCE_S:
                raise PartsError(f"rank {rank} has not begun to write its part within {_PATIENCE_S:.0f} s")
            patience_s = _PATIENCE_S if is_begun else _BEGINNING_S
            if self._since_end() > patience_s:
                raise PartsError(f"rank {rank} had not written its part {patience_s:.0f} s after the program's end")
            time.sleep(POLL_S)

    def _since_end(self) -> float:
        """Return the seconds since the main thread was first seen to have ended."""
        if threading.main_thread().is_alive():
            return 0.0
        if self._ended_s is None:
            self._ended_s = time.monotonic()
        return time.monotonic() - self._ended_s


def _is_free(path: Path) -> bool:
    """Return True if no process holds the lock of a file; False if that is gone, or the file system has no locks."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks no file for writing that is open for reading alone
    except FileNotFoundError:  # it has just been renamed
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)


def _mark_of(layout: FileLayout) -> str:
    """Return a hash of what a file holds, beside the values."""
    return hashlib.sha256(layout.header).hexdigest()


def _write_report(work: Path, rank: int, content: Mapping[str, object]) -> None:
    path = _report_path(work, rank)
    part = path.with_suffix(".new")
    part.write_text(json.dumps(content))
    part.replace(path)


def _lock_path(work: Path, rank: int) -> Path:
    return work / f"part-{rank:05d}.lock"


def _report_path(work: Path, rank: int) -> Path:
    return work / f"part-{rank:05d}.json"


def _write_at(handle: int, content: memoryview, offset: int) -> None:
    while content:
        count = os.pwrite(handle, content, offset)
        offset, content = offset + count, content[count:]
