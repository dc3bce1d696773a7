"""The description of a session: what servers update, and where it is. Ranks publish it as JSON.

A session is the time in which tables of one Trainer stay in the same memory. Memory has no name in the system: it is
that of a file descriptor of a rank, `/proc/PID/fd/N`, with an inode that no other file has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from unisono.shm.segment import Segment

__all__ = ["SegmentRecord", "SessionRecord", "TableRecord", "TensorRecord"]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor in one of the session's segments."""

    segment: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A table and the state of its optimizer."""

    name: str
    rule: str
    weight: TensorRecord
    state: dict[str, TensorRecord]


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """Memory that all ranks of a session have mapped."""

    inode: int
    fds: tuple[int, ...]
    """Its descriptor in each rank."""

    def open(self, pids: Sequence[int]) -> Segment | None:
        """Map the memory of a rank that is still there; None if it is gone with all of them."""
        for pid, number in zip(pids, self.fds, strict=True):
            try:
                fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # the process has ended, or has closed it
                continue
            if os.fstat(fd).st_ino == self.inode:
                return Segment(fd)
            os.close(fd)  # the number has a new owner
        return None


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session."""

    pids: tuple[int, ...]
    """The process of each rank."""
    servers: int
    placement: str
    ring: int
    """How many steps can be on their way: a rank's updates of step n are in slot n modulo this number."""
    capacity: int
    """The bytes of a slot."""
    redo_nbytes: int
    control: int
    slots: int
    """The numbers of the segments with these."""
    segments: tuple[SegmentRecord, ...]
    row_kernel: str
    """What ranks update rows with: servers must do so as well (`embedding.compiled_rows.row_kernel_name`)."""
    tables: tuple[TableRecord, ...] = field(default=())

    @property
    def has_columns(self) -> bool:
        """True if each server has some columns of all rows."""
        return self.placement == "column" and self.servers > 1

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.pids)

    def as_json(self) -> dict[str, Any]:
        """Return values that JSON has."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> SessionRecord:
        """Return what `as_json` was given."""
        segments = tuple(SegmentRecord(each["inode"], tuple(each["fds"])) for each in values["segments"])
        tables = tuple(
            TableRecord(
                each["name"],
                each["rule"],
                _tensor(each["weight"]),
                {key: _tensor(value) for key, value in each["state"].items()},
            )
            for each in values["tables"]
        )
        return cls(**{**values, "pids": tuple(values["pids"]), "segments": segments, "tables": tables})


def _tensor(values: dict[str, Any]) -> TensorRecord:
    return TensorRecord(values["segment"], values["offset"], tuple(values["shape"]), values["dtype"])
