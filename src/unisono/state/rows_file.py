"""A safetensors file of tensors that come in chunks of rows: memory holds one chunk, and the file appears as a whole.

Rows are written to a hidden file beside the final one, which is renamed once everything is on the disk. The header
comes first in the format and needs the number of rows, so room is left for it and it is written last. If that number
is not known from the start, it is not known where the second tensor begins either: then all but the first tensor are
kept in unnamed files, and appended at the end. Start reading at `RowsFile.append`.
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from unisono.state.codec import Json
from unisono.state.digest import memory
from unisono.state.durable_files import flush_folder, make_folder
from unisono.state.safetensors_format import encode_header, type_name

__all__ = ["RowsFile"]

_MOST_ROWS = 10**18
"""More rows than any file has. The size of the header is computed with this number."""


@dataclass(slots=True)
class _FileColumn:
    """One tensor of the file."""

    name: str
    dtype: str
    shape: list[int]
    """Of a row."""
    row_nbytes: int
    start: int = 0
    """Position of its first row in the file."""
    spool: IO[bytes] | None = None
    """Holds its rows for now, if `start` is not known yet."""

    def describe(self, rows: int, start: int, stop: int) -> Json:
        """Return its entry in the header."""
        return {"dtype": self.dtype, "shape": [rows, *self.shape], "data_offsets": [start, stop]}


class RowsFile:
    """Writes tensors row by row into a safetensors file, and puts it in place once it is complete.

    Args:
        path: The file. One that is there is replaced at the end; missing folders are created.
        rows: The number of rows, None if it is not known.

    Raises:
        OSError: The folder cannot be written to, or another process is writing the same file.
    """

    def __init__(self, path: Path, *, rows: int | None) -> None:
        self._path, self._part, self._rows = path, path.with_name(f".{path.name}.part"), rows
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder: give the path of a file in it")
        make_folder(path.parent)
        self._handle: int | None = _open_alone(self._part)
        self._columns: list[_FileColumn] = []
        self._room = self._done = 0

    def append(self, tensors: Mapping[str, Tensor]) -> None:
        """Write further rows: for each name a contiguous CPU tensor, whose first dimension is the rows.

        Raises:
            OSError: The file cannot be written.
        """
        assert self._handle is not None
        if not self._columns:
            self._lay_out(tensors)
        added = len(next(iter(tensors.values())))
        for column in self._columns:
            content = memory(tensors[column.name])
            if column.spool is not None:
                column.spool.write(content)
            else:
                _write_at(self._handle, content, column.start + self._done * column.row_nbytes)
        self._done += added

    def finish(self) -> None:
        """Write the header, and return when the file is on the disk under its name.

        Raises:
            OSError: The file cannot be written.
        """
        assert self._handle is not None
        end = self._room
        header: dict[str, Json] = {"__metadata__": {"format": "pt"}}
        with open(self._handle, "r+b", closefd=False) as file:
            for column in self._columns:
                nbytes = self._done * column.row_nbytes
                if column.spool is not None:
                    file.seek(end)
                    column.spool.seek(0)
                    shutil.copyfileobj(column.spool, file, 1 << 20)
                header[column.name] = column.describe(self._done, end - self._room, end - self._room + nbytes)
                end += nbytes
            file.seek(0)
            file.write(encode_header(header, room=self._room))
            file.flush()
            os.fsync(self._handle)
        self._part.replace(self._path)
        self._close()
        flush_folder(self._path.parent)

    def discard(self) -> None:
        """Remove what was written, unless it is in place already."""
        if self._handle is not None:
            with suppress(OSError):  # the error that led here is the one to show
                self._part.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)
        for column in self._columns:
            if column.spool is not None:
                column.spool.close()

    def _lay_out(self, tensors: Mapping[str, Tensor]) -> None:
        # Wide types first, as in the library: every tensor is then aligned in the file, and can be mapped.
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):
            kind = type_name(tensor.dtype)
            assert kind is not None, f"{name} is {tensor.dtype}"
            shape = [*tensor.shape[1:]]
            self._columns.append(_FileColumn(name, kind, shape, math.prod(shape) * tensor.dtype.itemsize))
        widest: dict[str, Json] = {"__metadata__": {"format": "pt"}}
        for column in self._columns:
            widest[column.name] = column.describe(_MOST_ROWS, _MOST_ROWS * 10**9, _MOST_ROWS * 10**9)
        self._room = start = len(encode_header(widest))
        for index, column in enumerate(self._columns):
            if index and self._rows is None:
                column.spool = tempfile.TemporaryFile(dir=self._path.parent)  # noqa: SIM115  closed with the others
            else:
                column.start = start
                start += (self._rows or 0) * column.row_nbytes


def _open_alone(path: Path) -> int:
    """Open an empty file for writing and lock it. Reuses a file of a killed process, never that of a live one."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BlockingIOError(
                    f"another process is writing {path.name.removeprefix('.').removesuffix('.part')} in {path.parent}: "
                    "wait for it, or give another path"
                ) from None
            except OSError:
                pass  # the file system has no locks
            if _is_at(path, handle):
                os.ftruncate(handle, 0)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the other process has just put it in place


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def _write_at(handle: int, content: Any, offset: int) -> None:
    written = 0
    while written < len(content):
        written += os.pwrite(handle, content[written:], offset + written)
