"""Memory that several processes of one host share.

A segment is an anonymous file: it lies in no folder, nobody can open it by name, and it is gone with the last process
that has it, however that one ends. It does not count against the size of /dev/shm.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from unisono.errors import UnisonoError
from unisono.plan.alignment import align_up

__all__ = ["ALIGNMENT", "Segment", "aligned"]

ALIGNMENT = 256
"""Bytes. 64 elements of float32, and no two ranks' data in one cache line, nor in the pair that is fetched together."""


def aligned(nbytes: int) -> int:
    """Round a size or an offset up to the alignment."""
    return align_up(nbytes, ALIGNMENT)


class Segment:
    """Shared memory of a fixed size, mapped into this process. New memory is all zero.

    Pages come into being when they are first written. The mapping lives as long as this object or a tensor on it.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory behind a descriptor, which is the segment's own from here on.

        Raises: UnisonoError if there is no room for it in this process.
        """
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        try:
            self.memory = mmap.mmap(fd, self.nbytes)
        except OSError as error:
            os.close(fd)
            raise UnisonoError(f"{self.nbytes} bytes of shared memory cannot be mapped: {error.strerror}") from error
        """The memory as bytes, for what is too small to be a tensor."""
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        """Where it lies in this process."""

    @classmethod
    def create(cls, nbytes: int, *, name: str) -> Segment:
        """Make a segment of so many bytes that can neither grow nor shrink.

        Args: name is what /proc/PID/maps shows, for people.
        Raises: UnisonoError if the system has not so much memory to give.
        """
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, max(aligned(nbytes), mmap.PAGESIZE))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise UnisonoError(f"{nbytes} bytes of shared memory cannot be had: {error.strerror}") from error
        return cls(fd)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Show a part of the memory as a contiguous tensor, whose storage is that part alone.

        Args: offset is in bytes from the beginning, a multiple of the type's size. shape is in elements.
        """
        numel = prod(shape)
        assert 0 <= offset <= offset + numel * dtype.itemsize <= self.nbytes
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype)
        # Not a part of one tensor over all: torch.save would write all of it with each part.
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset).view(tuple(shape))

    def close_descriptor(self) -> None:
        """Close the file descriptor, of which a process has few. The memory stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
