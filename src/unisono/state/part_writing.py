"""Writing of a checkpoint by several ranks: each writes its ranges of the files, and rank 0 completes it.

Ranks talk by files in the folder that is written, so a thread can write while training uses the collectives. Each rank
holds a lock there as long as it writes, and leaves a report at the end: the hashes of what it has written, or an error.
A rank whose lock is free and that has left no report has died. Start reading at `PartWriter` and `await_parts`.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from unisono.errors import CheckpointError
from unisono.state.digest import exact, memory
from unisono.state.durable_files import locked
from unisono.state.regions import FileEntry, Region, RegionHashes, chunks, region_nbytes

__all__ = ["FileRange", "PartWriter", "PartsError", "await_parts", "is_begun_by"]

_POLL_S = 0.02
_PATIENCE_S = 60.0
"""Seconds for which a process that ends otherwise waits for the parts of others."""


class FileRange(NamedTuple):
    """Bytes that a rank writes into a file."""

    file: str
    start: int
    data: bytes | Tensor


class PartsError(CheckpointError):
    """A rank has not written its part."""


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
        path.touch(exist_ok=False)
        self._lock.enter_context(locked(path))

    def write(self, ranges: Sequence[FileRange], nbytes: dict[str, int]) -> None:
        """Write and flush ranges of files, and report. An error is reported, too, and not raised.

        Args:
            ranges: The ranges. They do not overlap.
            nbytes: The size of each file.
        """
        try:
            try:
                content: object = {name: self._write_file(name, ranges, size) for name, size in nbytes.items()}
            except OSError as error:
                content = f"[Errno {error.errno}] {error.strerror}"
            # The folder is gone if rank 0 has given up.
            with suppress(FileNotFoundError):
                _write_report(self._work, self._rank, content)
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


def await_parts(work: Path, ranks: int, nbytes: dict[str, int]) -> list[FileEntry]:
    """Wait until all ranks have written their parts, and return the entries of the files.

    It ends soon after a rank has died, and a minute after the program of this process has ended otherwise.

    Args:
        work: The folder of the checkpoint that is written.
        ranks: The number of ranks.
        nbytes: The size of each file.

    Raises:
        PartsError: A rank could not write its part, or has died; or parts are missing.
    """
    regions: dict[str, list[Region]] = {name: [] for name in nbytes}
    has_ended = _ended_program()
    for rank in range(ranks):
        content = _await_report(work, rank, has_ended)
        if isinstance(content, str):
            raise PartsError(f"rank {rank} could not write its part: {content}")
        for name, own in content.items():
            regions[name] += [Region(start, stop, sha256, rank) for start, stop, sha256 in own]
    entries = []
    for name, size in nbytes.items():
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
    for rank in range(ranks):
        for path in (_lock_path(work, rank), _report_path(work, rank)):
            path.unlink(missing_ok=True)
    return entries


def _await_report(work: Path, rank: int, has_ended: Callable[[], bool]) -> str | dict[str, list[tuple[int, int, str]]]:
    while True:
        is_free = _is_free(_lock_path(work, rank))  # before the report is looked for: it comes before the lock is free
        with suppress(FileNotFoundError):
            found: str | dict[str, list[tuple[int, int, str]]] = json.loads(_report_path(work, rank).read_bytes())
            return found
        if is_free:
            raise PartsError(f"rank {rank} ended before it had written its part")
        if has_ended():
            raise PartsError(f"rank {rank} has not written its part within {_PATIENCE_S:.0f} s of the program's end")
        time.sleep(_POLL_S)


def _ended_program() -> Callable[[], bool]:
    """Return a function that is True a minute after the main thread has ended."""
    ended_s: float | None = None

    def has_ended() -> bool:
        nonlocal ended_s
        if threading.main_thread().is_alive():
            return False
        ended_s = time.monotonic() if ended_s is None else ended_s
        return time.monotonic() - ended_s > _PATIENCE_S

    return has_ended


def _is_free(path: Path) -> bool:
    """Return True if no process holds the lock of a file, or that is gone; False if the file system has no locks."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(handle)


def _write_report(work: Path, rank: int, content: object) -> None:
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
