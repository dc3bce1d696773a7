"""A safetensors file of which parts are read: ranges of tensors, each into memory that is there already.

With the entry of a manifest, each region that is touched is read as a whole and compared with its hash, in chunks of
1 MiB, so a part is checked without the rest and without memory for it. Start reading at `TensorFile.read`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.digest import memory
from unisono.state.durable_files import check_hash, explained, open_file
from unisono.state.regions import CHUNK, FileEntry, Region
from unisono.state.safetensors_format import StoredTensor, original_types, parse_header

__all__ = ["TensorFile", "TensorRange", "TensorSource", "check_regions"]


class TensorRange(NamedTuple):
    """Some elements of a tensor in a file, and the memory that gets them."""

    name: str
    start: int
    """The first element, counted in the order of indices, as in a contiguous tensor."""
    into: Tensor
    """A contiguous tensor on the CPU, of the dtype of the one in the file; it has as many elements as are read."""


class TensorSource(ABC):
    """Named tensors of which parts are read."""

    forms: dict[str, Tensor]
    """By name, a tensor on the meta device, with the dtype and shape of the one that is read. Tied names have one."""
    stored: list[str]
    """The names of different tensors. Of tied names it has one."""

    @abstractmethod
    def read(self, ranges: Iterable[TensorRange]) -> None:
        """Read ranges of tensors. If it raises, what the ranges' memory holds is not to be used.

        Raises:
            CorruptCheckpointError: A region that was touched is damaged; the message has its place and who wrote it.
            CheckpointError: A file cannot be read.
            ValueError: A range is not in its tensor.
        """

    def read_tensor(self, name: str) -> Tensor:
        """Return a whole tensor."""
        tensor = torch.empty(self.forms[name].shape, dtype=self.forms[name].dtype)
        self.read([TensorRange(name, 0, tensor)])
        return tensor

    def read_all(self) -> dict[str, Tensor]:
        """Return all tensors by name."""
        tensors = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in self.forms.items()}
        self.read([TensorRange(name, 0, tensor) for name, tensor in tensors.items()])
        return tensors


class _Wanted(NamedTuple):
    """Bytes of a file, and the memory that gets them."""

    start: int
    view: memoryview

    @property
    def stop(self) -> int:
        return self.start + len(self.view)


class TensorFile(TensorSource):
    """A safetensors file, whose header is read and checked at once, and its tensors when they are asked for.

    Args:
        path: The file.
        entry: Its size and hashes. None: it is a file without, such as one that another program has written.
        described: The description of its tensors in a manifest, if it is of a checkpoint.

    Raises:
        CorruptCheckpointError: With an entry: the file cannot be read, is damaged, or is no such file.
        CheckpointError: Without: it cannot be read or is no such file.
    """

    def __init__(
        self, path: Path, *, entry: FileEntry | None = None, described: Mapping[str, Any] | None = None
    ) -> None:
        self.path, self._entry = path, entry
        try:
            with self._open() as file:
                head = self._read_header(file)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Check the path and its rights.") from error
        self._stored, notes = head
        self.stored = [*self._stored]  # in the order of their bytes
        forms = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in self._stored.items()}
        owners = {name: name for name in self._stored}
        if described is not None:
            owners |= {name: described["aliases"].get(name, name) for name in described["names"]}
        else:
            owners |= {name: owner for name, owner in notes.items() if owner in forms and name != "format"}
        self._owners: dict[str, str] = owners
        try:
            self.forms = original_types(forms, notes, described)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise self._no_such_file(error) from error

    def read(self, ranges: Iterable[TensorRange]) -> None:
        """Read ranges of tensors; see `TensorSource`. Each region of the file is read once, in order. Memory: 1 MiB."""
        wanted = []
        for name, start, into in ranges:
            form, stored = self.forms[name], self._stored[self._owners[name]]
            if into.dtype != form.dtype or not 0 <= start <= start + into.numel() <= form.numel():
                raise ValueError(
                    f"{into.numel()} elements of {into.dtype} from {start} on are not in {name}, which has "
                    f"{form.numel()} of {form.dtype}"
                )
            wanted.append(_Wanted(stored.start + start * form.element_size(), memory(into)))
        wanted = sorted((each for each in wanted if each.view), key=lambda each: each.start)
        if not wanted:
            return
        try:
            with self._open() as file:
                self._fill(file, wanted)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}. Check the path and its rights.") from error

    def _open(self) -> io.FileIO:
        entry = self._entry
        if entry is None:
            return open_file(self.path, lambda size: True, "a safetensors file")
        expected = f"{entry.nbytes:,} bytes"
        with explained(self.path, expected):
            return open_file(self.path, lambda size: size == entry.nbytes, expected)

    def _read_header(self, file: io.FileIO) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
        size = os.fstat(file.fileno()).st_size
        length = bytearray(8)
        _read_at(file, 0, memoryview(length)[: min(8, size)])
        # At once, since regions may be large.
        head = bytearray(min(8 + int.from_bytes(length, "little"), size))
        self._fill(file, [_Wanted(0, memoryview(head))] if head else [])
        at = 0

        def read(view: memoryview) -> None:
            nonlocal at
            view[:] = head[at : at + len(view)]
            at += len(view)

        try:
            return parse_header(read, size, ordered=self._entry is None)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, RecursionError) as error:
            raise self._no_such_file(error) from error

    def _no_such_file(self, error: Exception) -> CheckpointError:
        if self._entry is None:
            return CheckpointError(
                f"{self.path} is no safetensors file: {error}. It was cut off, or it is something else."
            )
        return CorruptCheckpointError(
            f"{self.path} does not hold the tensors that its manifest describes: {type(error).__name__}: {error}. It "
            "was not written by unisono, or by a newer one. Take an older checkpoint, or upgrade."
        )

    def _fill(self, file: io.FileIO, wanted: Sequence[_Wanted]) -> None:
        """Read ranges of bytes, in the order of their starts."""
        if self._entry is None:
            for start, view in wanted:
                _read_at(file, start, view)
            return
        with explained(self.path, f"{self._entry.nbytes:,} bytes"):
            buffer = memoryview(bytearray(CHUNK))
            first = 0
            for region in self._entry.regions:
                while first < len(wanted) and wanted[first].stop <= region.start:
                    first += 1
                if first == len(wanted):
                    break
                if region.stop <= wanted[first].start:
                    continue
                sha = hashlib.sha256()
                for start in range(region.start, region.stop, CHUNK):
                    chunk = buffer[: min(CHUNK, region.stop - start)]
                    _read_at(file, start, chunk)
                    sha.update(chunk)
                    _copy(chunk, start, wanted, first)
                check_hash(self.path, self._entry, region, sha.hexdigest())


def check_regions(path: Path, entry: FileEntry, regions: Iterable[Region]) -> None:
    """Compare some regions of a file with their hashes, and its size.

    Raises:
        CorruptCheckpointError: The file is damaged; the message has the place and who wrote it.
    """
    expected = f"{entry.nbytes:,} bytes"
    buffer = memoryview(bytearray(CHUNK))
    with explained(path, expected), open_file(path, lambda size: size == entry.nbytes, expected) as file:
        for region in regions:
            sha = hashlib.sha256()
            for start in range(region.start, region.stop, CHUNK):
                chunk = buffer[: min(CHUNK, region.stop - start)]
                _read_at(file, start, chunk)
                sha.update(chunk)
            check_hash(path, entry, region, sha.hexdigest())


def _read_at(file: io.FileIO, start: int, view: memoryview) -> None:
    read = partial(os.preadv, file.fileno())
    while view:
        count = read([view], start)
        if not count:
            raise OSError(errno.EIO, "the file ended early")
        start, view = start + count, view[count:]


def _copy(chunk: memoryview, start: int, wanted: Sequence[_Wanted], first: int) -> None:
    """Copy a chunk of the file to where it is wanted."""
    stop = start + len(chunk)
    for each in wanted[first:]:
        if each.start >= stop:
            break
        low, high = max(start, each.start), min(stop, each.stop)
        if low < high:
            each.view[low - each.start : high - each.start] = chunk[low - start : high - start]
