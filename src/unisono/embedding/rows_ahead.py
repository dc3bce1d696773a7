"""Reading rows ahead: the pages of tables in files that a later lookup and its update need, while something else runs.

A lookup of rows that are on the disk waits for one page after the other. A thread asks the kernel for the pages of many
rows at once, and the disk reads them at the same time. The rows and the state of their optimizer are then in memory
when they are needed. No value is read or written here, so nothing but time depends on it.

Start reading at `RowsAhead.begin`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from threading import Thread, current_thread
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.embedding.id_checks import check_ids
from unisono.embedding.table_modules import BagTable, RowTable
from unisono.shm.segment import Segment
from unisono.text import a_type

__all__ = ["RowsAhead", "ask_for", "ranges_of"]

_WILLNEED = 3
_PROCESS_MADVISE = 440
"""The number of the system call, on all architectures. It takes many ranges, but is newer than `madvise`."""
_MOST_RANGES = 1024
"""The ranges that a call takes."""


class _RowsInFile(NamedTuple):
    """Some rows of a table in a file."""

    segment: Segment
    """The file, which stays mapped as long as this is there."""
    stores: list[tuple[int, int]]
    """The address and the bytes of a row, of the table and of each state of its optimizer."""
    rows: Tensor
    """[n], in any order."""


class RowsAhead:
    """Reads rows of tables ahead.

    Args:
        tables: The tables. Those in memory have nothing to be read.
    """

    def __init__(self, tables: Iterable[RowTable | BagTable]) -> None:
        self._tables: dict[str, RowTable | BagTable] = {}
        self._doubled: set[str] = set()
        for table in tables:
            if self._tables.setdefault(table.name, table) is not table:
                self._doubled.add(table.name)
        self._wanted: deque[list[_RowsInFile]] = deque(maxlen=1)
        """What is to be read next: if the disk is too slow, what was wanted before is dropped."""
        self._latest: _PageReader | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, which have no thread."""
        return {**self.__dict__, "_wanted": deque(maxlen=1), "_latest": None}

    @property
    def has_files(self) -> bool:
        """True if a table is in a file."""
        return any(table.file is not None for table in self._tables.values())

    def begin(self, lookups: Sequence[Mapping[str, Tensor]], *, source: str) -> None:
        """Begin to read rows, and return at once.

        Args:
            lookups: The ids that will be looked up, by the name of the table.
            source: Who says so, for messages.

        Raises:
            TypeError: These are not ids by name.
            ValueError: There is no such table, or several.
            IndexError: An id is out of range.
        """
        parts = [part for each in lookups for part in self._parts(each, source)]
        if not parts:
            return
        self._wanted.append(parts)
        latest = self._latest
        if latest is None or latest.has_begun or not latest.is_alive():
            # Not one thread for all calls: nothing is left of it when rows are read, and a forked process needs none.
            self._latest = _PageReader(self._wanted, latest)
            self._latest.start()

    def named(self, lookups: Mapping[str, Tensor], *, source: str) -> list[tuple[RowTable | BagTable, Tensor]]:
        """Return tables and their ids, [n], int64. For arguments and errors see `begin`."""
        if not isinstance(lookups, Mapping):
            raise TypeError(f'{source} is {a_type(lookups)}; give ids by the name of the table, as {{"item": ids}}')
        found = []
        for name, ids in lookups.items():
            table = self._table(name, source)
            check_ids(name, ids, rows=table.table.rows)
            found.append((table, ids.detach().reshape(-1).to(table.weight.device, torch.int64)))
        return found

    def end(self) -> None:
        """Wait until nothing is read any more."""
        if self._latest is not None and self._latest is not current_thread():  # which may collect garbage
            self._latest.join()

    def _parts(self, lookups: Mapping[str, Tensor], source: str) -> list[_RowsInFile]:
        parts = []
        for table, ids in self.named(lookups, source=source):
            if table.file is None or table.rows is None:
                continue
            rows = table.rows.find(ids)
            file = table.file
            stores = [
                (tensor.data_ptr(), tensor[:1].numel() * tensor.element_size())
                for tensor in (file.weight, *file.state.values())
            ]
            rows = rows[rows >= 0]
            if table.rows.owners is not None:
                rows = rows[table.rows.owners.keep(rows)]
            parts.append(_RowsInFile(file.segment, stores, rows))
        return parts

    def _table(self, name: object, source: str) -> RowTable | BagTable:
        if name in self._doubled:
            raise ValueError(f"{source} has ids of table {name!r}, and there are several of this name: rename one")
        if isinstance(name, str) and name in self._tables:
            return self._tables[name]
        near = get_close_matches(str(name), self._tables, n=1, cutoff=0.5)
        advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(map(repr, self._tables))}"
        raise ValueError(f"{source} has ids of table {name!r}, which there is none: {advice}")


class _PageReader(Thread):
    """Reads what is wanted when the one before has ended.

    Args:
        wanted: Parts of tables, which may change until they are taken.
        before: The reader before.
    """

    def __init__(self, wanted: deque[list[_RowsInFile]], before: _PageReader | None) -> None:
        super().__init__(name="unisono-rows-ahead")
        self._wanted, self._before = wanted, before
        self.has_begun = False
        """False until it takes what is wanted, after which it sees nothing new."""

    def run(self) -> None:
        """Read."""
        if self._before is not None:
            self._before.join()
            self._before = None
        self.has_begun = True
        for part in self._wanted.popleft() if self._wanted else ():
            rows = torch.unique(part.rows)
            for address, row_nbytes in part.stores:
                ask_for(ranges_of(rows, address=address, row_nbytes=row_nbytes))


def ranges_of(rows: Tensor, *, address: int, row_nbytes: int) -> Tensor:
    """Return the pages of rows, as ranges that do not touch, [n, 2]: where each begins, and its bytes.

    Args:
        rows: Ascending, [n], int64.
        address: The address of row 0.
        row_nbytes: The bytes of a row.

    >>> ranges_of(torch.tensor([0, 1, 70]), address=4096, row_nbytes=256).tolist()
    [[4096, 4096], [20480, 4096]]
    """
    begins = (address + rows * row_nbytes) // mmap.PAGESIZE
    ends = (address + (rows + 1) * row_nbytes - 1) // mmap.PAGESIZE + 1
    is_apart = begins[1:] > ends[:-1]
    first = torch.cat([begins[:1], begins[1:][is_apart]])
    last = torch.cat([ends[:-1][is_apart], ends[-1:]])
    return torch.stack([first, last - first], dim=1) * mmap.PAGESIZE


def ask_for(ranges: Tensor, *, one_by_one: bool = False) -> None:
    """Ask the kernel to read mapped pages into memory. It may decline.

    Args:
        ranges: Of pages that are mapped, [n, 2], int64: addresses and bytes.
        one_by_one: True for a call for each range, as kernels before 5.10 need, and later ones without privileges.
    """
    libc, ranges, done = ctypes.CDLL(None, use_errno=True), ranges.contiguous(), 0
    if not one_by_one:
        fd = os.pidfd_open(os.getpid())
        try:
            while done < len(ranges):
                count = min(len(ranges) - done, _MOST_RANGES)
                place = ctypes.c_void_p(ranges[done:].data_ptr())
                if libc.syscall(_PROCESS_MADVISE, fd, place, ctypes.c_size_t(count), _WILLNEED, 0) < 0:
                    break
                done += count
        finally:
            os.close(fd)
    for address, nbytes in ranges[done:].tolist():
        libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _WILLNEED)
