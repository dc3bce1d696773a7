"""A CSV file with a line for each step, which gets new lines and new columns.

The last line stays open: numbers of its step may still come, and it is written again then. For a new column the file is
rewritten, with empty cells in older lines; that happens when the first evaluation ends, and rarely later.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from unisono.loggers.rows import Row

__all__ = ["CsvTable", "put_aside"]

_FIRST = ("step", "epoch", "time")


class _Last(NamedTuple):
    """The end of a file."""

    line: dict[str, str]
    """The last line, by column; empty if there is none."""
    start: int
    """Where it begins."""
    end: int


class CsvTable:
    """The file, from its header on.

    Args:
        path: The file; it is created if it is missing.
        last_step: Lines of later steps are removed from a file that is there.

    Raises:
        ValueError: The file is another kind of table.
        OSError: It cannot be read or written.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        self._path = path
        self._columns = [*_FIRST]
        self._open: dict[str, str] = {}
        """The last line, by column."""
        self._closed: list[dict[str, str]] = []
        """Lines before it that are not in the file yet."""
        self._end = 0
        """Where the open line begins in the file."""
        self._new_columns = False
        if path.exists() and path.stat().st_size:
            self._columns = _header(path)
            last = self._rewrite(before=last_step + 1)
            self._open, self._end = {name: cell for name, cell in last.line.items() if cell}, last.start
        else:
            with path.open("wb") as file:
                file.write(_line(self._columns))
            self._end = path.stat().st_size
        self._file = path.open("r+b")

    def add(self, row: Row) -> None:
        """Add numbers to the line of their step, which is that of the previous row or a later one."""
        known = self._open.get("step") == str(row.step)
        if self._open and not known:
            self._closed.append(self._open)
        if not known:
            self._open = {"step": str(row.step), "epoch": str(row.epoch), "time": repr(row.time)}
        for name, value in row.values.items():
            if name not in self._columns:
                self._columns.append(name)
                self._new_columns = True
            self._open[name] = repr(value)

    def flush(self) -> None:
        """Write the lines added since the last `flush`.

        Raises:
            OSError: The file cannot be written.
        """
        if self._new_columns:
            self._file.close()
            unwritten = self._closed[0] if self._closed else self._open
            self._end = self._rewrite(before=int(unwritten["step"])).end
            self._file = self._path.open("r+b")
            self._new_columns = False
        closed = b"".join(_line([line.get(name, "") for name in self._columns]) for line in self._closed)
        last = _line([self._open.get(name, "") for name in self._columns]) if self._open else b""
        self._file.seek(self._end)
        self._file.truncate()
        self._file.write(closed + last)
        self._file.flush()
        self._closed = []
        self._end += len(closed)

    def close(self) -> None:
        """Close the file. It holds the lines that were added before the last `flush`."""
        self._file.close()

    def _rewrite(self, *, before: int) -> _Last:
        """Rewrite the file with this table's columns and the lines before a step; return the state of its end."""
        new = self._path.with_name(f".{self._path.name}.part")
        last: dict[str, str] = {}
        with new.open("wb") as file:
            file.write(_line(self._columns))
            start = file.tell()
            for line in _lines(self._path):
                if int(line["step"]) >= before:
                    break
                last, start = line, file.tell()
                file.write(_line([line.get(name, "") for name in self._columns]))
            end = file.tell()
        new.replace(self._path)
        return _Last(last, start, end)


def put_aside(path: Path) -> None:
    """Rename a file if it exists: metrics.csv becomes metrics.1.csv, or the first such name that is free."""
    if path.exists():
        number = 1
        while (other := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(other)


def _header(path: Path) -> list[str]:
    with path.open(encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file), [])
    if tuple(columns[: len(_FIRST)]) != _FIRST:
        raise ValueError(
            f"{path} is no file of CSVLogger: its first line is {','.join(columns)[:80]!r}. Move it away, or give "
            "another path"
        )
    return columns


def _lines(path: Path) -> Iterator[dict[str, str]]:
    """Yield the lines of a file by column, without one at the end that a killed process has left incomplete."""
    columns = _header(path)
    with path.open(encoding="utf-8", newline="") as file:
        next(file)
        for cells in csv.reader(line for line in file if line.endswith("\n")):
            yield dict(zip(columns, cells, strict=False))


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()
