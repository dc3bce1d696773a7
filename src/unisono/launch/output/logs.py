"""Log files of a run: a folder for the run contains one per attempt, and that contains one per rank.

`route` is pure and decides where the output of a rank goes, as torchrun's flags define it. `RunLogs` creates folders
and files, `LogFile` survives a full disk. Start reading at `RunLogs.open`.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from unisono.errors import LaunchError
from unisono.launch.launch_job import Output

__all__ = ["STREAMS", "LogFile", "Route", "RunLogs", "make_run_folder", "route"]

STREAMS = ("stdout", "stderr")


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where one stream of one rank goes."""

    logged: bool
    """True if it goes to a log file."""
    shown: bool
    """True if it goes to the launcher's stream."""


def route(output: Output, rank: int, stream: str) -> Route:
    """Decide where a stream goes: redirected means to a file only, teed means shown as well.

    With a folder and neither, everything is teed. The null device as folder means no files and no redirection.

    >>> everything = Output(directory=Path("logs"))
    >>> route(everything, 0, "stdout")
    Route(logged=True, shown=True)
    >>> errors = Output(directory=Path("logs"), redirected={1: frozenset({"stderr"})}, shown=frozenset({1}))
    >>> route(errors, 1, "stderr"), route(errors, 0, "stderr")
    (Route(logged=True, shown=False), Route(logged=False, shown=False))
    """
    shown = output.shown is None or rank in output.shown
    if not _wants_files(output):
        return Route(logged=False, shown=shown)
    if not _names_streams(output):
        return Route(logged=True, shown=shown)
    redirected, teed = (stream in streams.get(rank, ()) for streams in (output.redirected, output.teed))
    return Route(logged=redirected or teed, shown=shown and (teed or not redirected))


class RunLogs:
    """The log files of one run; none if the output names neither a folder nor streams nor filters for files.

    Where streams go to files and no folder is named, they go to a new one in the system's folder for temporary files,
    as under torchrun.

    Args:
        run_id: The name of the run's folder.
        complain: Called with a sentence that names such a new folder and, once, if a file cannot be written.

    Raises:
        LaunchError: The folder cannot be created.
    """

    def __init__(self, output: Output, *, run_id: str, complain: Callable[[str], None]) -> None:
        self._output = output
        self._complain = complain
        self._complained = False
        self._filtered: dict[tuple[int, str], LogFile] = {}
        self.folder: Path | None = None
        """The folder of this run; None without log files."""
        if _wants_files(output):
            self.folder = make_run_folder(output.directory, run_id)
            if output.directory is None:
                complain(f"log files are in {str(self.folder)!r}; name another folder with --log-dir")

    def rank_folder(self, rank: int, attempt: int) -> Path | None:
        """Return the folder of one rank in one attempt, whether it exists or not; None without log files."""
        return self.folder / f"attempt_{attempt}" / str(rank) if self.folder else None

    def open(self, rank: int, attempt: int, *, again: bool = False) -> dict[str, LogFile]:
        """Create the files of one rank and return them by stream, for the streams that have one.

        Args:
            again: True to append to the files, for a process in the place of an earlier one.
        """
        folder = self.rank_folder(rank, attempt)
        if folder is None:
            return {}
        files = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stream in STREAMS:
                if route(self._output, rank, stream).logged:
                    files[stream] = LogFile(folder / f"{stream}.log", complain=self._complain_once, again=again)
        except OSError as error:
            self._complain_once(folder, error)
        return files

    def filter(self, stream: str, attempt: int, lines: list[bytes], *, prefix: bytes) -> None:
        """Append the lines that contain one of the filter texts to the file that all ranks share."""
        texts = self._output.stdout_filters if stream == "stdout" else self._output.stderr_filters
        if texts and self.folder is not None:
            wanted = [line for line in lines if any(text.encode() in line for text in texts)]
            if wanted and (file := self._filtered_file(stream, attempt)):
                file.write(b"".join(prefix + line + b"\n" for line in wanted))

    def close(self) -> None:
        """Close the files that all ranks share."""
        for file in self._filtered.values():
            file.close()
        self._filtered.clear()

    def _filtered_file(self, stream: str, attempt: int) -> LogFile | None:
        if (attempt, stream) not in self._filtered:
            assert self.folder is not None
            path = self.folder / f"attempt_{attempt}" / f"filtered_{stream}.log"
            try:
                self._filtered[attempt, stream] = LogFile(path, complain=self._complain_once)
            except OSError as error:
                self._complain_once(path, error)
        return self._filtered.get((attempt, stream))

    def _complain_once(self, path: Path, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            self._complain(
                f"cannot write {str(path)!r}: {error.strerror}; the job goes on, its log files will not be complete"
            )


class LogFile:
    """A new file to which bytes are appended. Bytes that a full disk does not accept are left out, and counted.

    Args:
        again: True if the file may exist already.

    Raises:
        OSError: The file cannot be created, or exists already.
    """

    def __init__(self, path: Path, *, complain: Callable[[Path, OSError], None], again: bool = False) -> None:
        self.path = path
        self._complain = complain
        self._missing = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if again else os.O_EXCL)
        self._file = os.open(path, flags, 0o666)

    def write(self, data: bytes) -> None:
        """Append the bytes, unless the file is closed. After a gap, a line that reports it comes first."""
        if self._file < 0:
            return
        if self._missing:
            note = f"\n[unisono: {self._missing} bytes are missing here, the disk did not take them]\n".encode()
            if self._write(note) < len(note):
                self._missing += len(data)
                return
            self._missing = 0
        self._missing = len(data) - self._write(data)

    def close(self) -> None:
        """Close the file. May be called again."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> int:
        written = 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:] if written else data)
        except OSError as error:
            self._complain(self.path, error)
        return written


def make_run_folder(directory: Path | None, run_id: str) -> Path:
    """Create and return a new folder: `directory/run_id`, or with -2, -3, … appended. None: a temporary one.

    Raises:
        LaunchError: The folder cannot be created.
    """
    try:
        if directory is None:
            return Path(tempfile.mkdtemp(prefix="unisono_"))
        if directory.exists() and not directory.is_dir():
            raise LaunchError(
                f"cannot write log files in {str(directory)!r}: it is a file; name a folder with --log-dir"
            )
        directory.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.+=@:-]", "_", run_id).lstrip(".")[:200] or "run"
        for folder in (directory / (name if number == 1 else f"{name}-{number}") for number in count(1)):
            with suppress(FileExistsError):
                folder.mkdir()
                return folder.absolute()
    except OSError as error:
        raise LaunchError(
            f"cannot write log files in {str(directory or tempfile.gettempdir())!r}: {error.strerror}; name a folder "
            "that you may write with --log-dir"
        ) from error
    raise AssertionError("numbers do not end")


def _wants_files(output: Output) -> bool:
    if output.directory == Path(os.devnull):
        return False
    filters = output.stdout_filters or output.stderr_filters
    return output.directory is not None or _names_streams(output) or bool(filters)


def _names_streams(output: Output) -> bool:
    return any(streams for both in (output.redirected, output.teed) for streams in both.values())
