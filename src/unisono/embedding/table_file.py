"""Memory of a table in a file that is mapped, so that a table may be larger than memory.

The file has the rows and the state of their optimizer. It is sparse until `reserve`: what is not written takes no
space. It has no name (`shm/unnamed_file.py`), so it is gone when the last process that has it ends. Pages that were
read or written stay in memory as long as the kernel has room, and it writes changed ones back when it wants to.
"""

from __future__ import annotations

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
        try:
            self.segment = self._prepared(unnamed_file(self.directory, self.nbytes))
        except OSError as error:
            raise UnisonoError(
                f"the rows of table {name!r} cannot have a file of {self.nbytes:,} bytes in {self.directory}: {error}"
            ) from error
        """The file, whose descriptor stays open."""
        self.is_shared = False
        """True if other ranks have the file, too."""
        self._is_reserved = self._has_state = False

    def __del__(self) -> None:
        """Close the descriptor. The mapping stays while tensors have it."""
        if "segment" in self.__dict__:
            self.segment.close_descriptor()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

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
        was_there = self._has_state
        state = self.reserved_state()
        if was_there:
            for tensor in state.values():
                tensor.zero_()
        return state

    def reserved_state(self) -> dict[str, Tensor]:
        """Return the state of the optimizer as it is, and make sure of the room as `new_state` does."""
        self.reserve()
        self._has_state = True
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
            reserve(self.segment)
        except OSError as error:
            raise UnisonoError(
                f"the rows of table {self.name!r} and the state of its optimizer take {self.nbytes:,} bytes in "
                f"{self.directory}, where {free_bytes(self.directory):,} are free: {error.strerror}. Nothing was "
                "written. Make room, or give a folder on another disk."
            ) from error
        self._is_reserved = True

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

    def _prepared(self, segment: Segment) -> Segment:
        # Rows are read at random, so what is beside them on the disk is not wanted.
        segment.memory.madvise(mmap.MADV_RANDOM)
        return segment

    def _tensor(self, key: str) -> Tensor:
        return self.segment.tensor(self._offsets[key], self._shapes[key], self._dtype)
