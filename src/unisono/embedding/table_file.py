"""Memory of a table in a file that is mapped, so that a table may be larger than memory.

The file has the rows and the state of their optimizer. It is sparse until `reserve`: what is not written takes no
space. It has no name (`shm/unnamed_file.py`), so it is gone when the last process that has it ends. Pages that were
read or written stay in memory as long as the kernel has room, and it writes changed ones back when it wants to.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unisono.errors import UnisonoError
from unisono.machine import file_system_of
from unisono.plan.alignment import align_up
from unisono.shm.segment import Segment
from unisono.shm.unnamed_file import reserve, unnamed_file

__all__ = ["TableFile", "check_directory", "free_bytes"]

_WEIGHT = "weight"
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "fuse.sshfs", "lustre", "gpfs", "beegfs"})
"""File systems of a network: each row that is not in memory would be a message, and some have no shared mappings."""
_PROBE_NBYTES = 4096


def check_directory(directory: Path) -> None:
    """Raise ValueError if files of tables cannot be in a directory."""
    advice = "Give an existing folder on a disk of this machine."
    if not directory.is_dir():
        what = "is no folder" if directory.exists() else "does not exist"
        raise ValueError(f"directory={str(directory)!r} {what}. {advice}")
    kind = file_system_of(directory)
    if kind in _NETWORK:
        raise ValueError(
            f"directory={str(directory)!r} is on a file system of a network ({kind}), where each row that is not in "
            f"memory is a message. {advice}"
        )
    try:
        segment = unnamed_file(directory, _PROBE_NBYTES)
        try:
            reserve(segment)
        finally:
            segment.close_descriptor()
    except (OSError, UnisonoError) as error:
        of_kind = f" (file system {kind})" if kind else ""
        raise ValueError(
            f"directory={str(directory)!r}{of_kind} cannot have a file that is mapped into memory and whose space is "
            f"reserved: {error}. {advice}"
        ) from error


def free_bytes(directory: Path) -> int:
    """Return the bytes that this user can still write there."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


class TableFile:
    """The file of one table. A copy or a pickle of it is None: copied tables are in memory.

    Args:
        name: The table, for messages.
        directory: A folder, which `check_directory` accepts.
        weight: The shape of the rows.
        state: The shapes of the state of their optimizer, by key.
        dtype: The type of all of these.

    Raises:
        UnisonoError: The file cannot be made.
    """

    def __init__(
        self, name: str, directory: Path, weight: Sequence[int], state: Mapping[str, Sequence[int]], dtype: torch.dtype
    ) -> None:
        self.name, self.directory = name, directory
        self._dtype, self._shapes = dtype, {_WEIGHT: weight, **state}
        self._offsets: dict[str, int] = {}
        self.nbytes = 0
        """The size of everything."""
        for key, shape in self._shapes.items():
            self._offsets[key] = self.nbytes
            self.nbytes += align_up(torch.Size(shape).numel() * dtype.itemsize, mmap.PAGESIZE)
        self.segment = self._made()
        """The file, whose descriptor stays open."""
        self.is_shared = False
        """True if other ranks have the file, too."""
        self._kept: Sequence[range] | None = None
        """The rows of this rank, where each has a file of its own; None: all rows."""
        self._is_reserved = False
        self._used: set[str] = set()
        """What of the state may be other than zeros."""

    def __del__(self) -> None:
        """Close the descriptor. The mapping stays while tensors have it."""
        if "segment" in self.__dict__:
            self.segment.close_descriptor()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @property
    def is_divided(self) -> bool:
        """True if this rank has a part of the rows, in a file of its own."""
        return self._kept is not None

    @property
    def inode(self) -> int:
        """A number that no other file of its file system has."""
        return os.fstat(self.segment.fd).st_ino

    @property
    def weight(self) -> Tensor:
        """The rows, [rows, dim]."""
        return self._tensor(_WEIGHT)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The state of the optimizer by key."""
        return {key: self._tensor(key) for key in self._shapes if key != _WEIGHT}

    def new_state(self) -> dict[str, Tensor]:
        """Return the state of the optimizer, of zeros, and make sure that the disk has room for it, and for the rows.

        Raises:
            UnisonoError: It has none.
        """
        self.reserve()
        return {key: self.zeros(key) for key in self._shapes if key != _WEIGHT}

    def zeros(self, key: str) -> Tensor:
        """Return one tensor of the state as `new_state` does."""
        self.reserve()
        tensor = self._tensor(key)
        if key in self._used:
            for rows in [range(len(tensor))] if self._kept is None else self._kept:
                tensor[rows.start : rows.stop].zero_()
        self._used.add(key)
        return tensor

    def reserved_state(self) -> dict[str, Tensor]:
        """Return the state of the optimizer as it is, and make sure of the room as `new_state` does."""
        self.reserve()
        self._used |= self.state.keys()
        return dict(self.state)

    def has(self, tensor: Any) -> bool:
        """Return True if a value is a tensor in this file."""
        if not isinstance(tensor, Tensor):
            return False
        return self.segment.address <= tensor.data_ptr() < self.segment.address + self.segment.nbytes

    def reserve(self) -> None:
        """Allocate the space of the file, unless that is done: a full disk is an error here, and not a signal later.

        Raises:
            UnisonoError: There is no room.
        """
        if self._is_reserved:
            return
        try:
            if self._kept is None:
                reserve(self.segment)
            else:
                self._reserve_rows(self._kept)
        except OSError as error:
            part = "" if self._kept is None else f"this rank's part, {sum(map(len, self._kept))}, of "
            raise UnisonoError(
                f"{part}the rows of table {self.name!r} and the state of its optimizer take {self._kept_nbytes:,} "
                f"bytes in {self.directory}, where {free_bytes(self.directory):,} are free: {error.strerror}. Nothing "
                "was written. Make room, or give a folder on another disk."
            ) from error
        self._is_reserved = True

    def divide(self, kept: Sequence[range]) -> None:
        """Take a new file of zeros, for a part of the rows: only these may be written.

        Args:
            kept: The rows of this rank, as ascending ranges.

        Raises:
            UnisonoError: The file cannot be made.
        """
        segment = self._made()
        self.segment.close_descriptor()
        self.segment, self._kept, self.is_shared = segment, kept, False
        self._is_reserved, self._used = False, set()

    def take(self, fd: int) -> None:
        """Take the file of another rank in place of the own one.

        Args:
            fd: Its descriptor, which this object then owns.

        Raises:
            UnisonoError: It cannot be mapped.
        """
        segment = Segment(fd)
        self.segment.close_descriptor()
        self.segment, self._is_reserved = self._prepared(segment), False

    @property
    def _kept_nbytes(self) -> int:
        """The size of the rows of this rank, and of their state."""
        if self._kept is None:
            return self.nbytes
        count = sum(map(len, self._kept))
        return sum(count * torch.Size(shape[1:]).numel() * self._dtype.itemsize for shape in self._shapes.values())

    def _reserve_rows(self, kept: Sequence[range]) -> None:
        if self._kept_nbytes > free_bytes(self.directory):  # before a part of it is taken
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        for key, shape in self._shapes.items():
            row_nbytes = torch.Size(shape[1:]).numel() * self._dtype.itemsize
            for rows in kept:
                reserve(self.segment, row_nbytes * len(rows), start=self._offsets[key] + row_nbytes * rows.start)

    def _made(self) -> Segment:
        try:
            return self._prepared(unnamed_file(self.directory, self.nbytes))
        except OSError as error:
            raise UnisonoError(
                f"the rows of table {self.name!r} cannot have a file of {self.nbytes:,} bytes in {self.directory}: "
                f"{error}"
            ) from error

    def _prepared(self, segment: Segment) -> Segment:
        # Rows are read at random, so what is beside them on the disk is not wanted.
        segment.memory.madvise(mmap.MADV_RANDOM)
        return segment

    def _tensor(self, key: str) -> Tensor:
        return self.segment.tensor(self._offsets[key], self._shapes[key], self._dtype)
