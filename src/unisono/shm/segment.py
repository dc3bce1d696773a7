"""Memory that several processes of one host share.

A segment is an anonymous file: it is in no directory, cannot be opened by name, and is freed when the last process that
has it ends, however that happens. It does not count against the size of /dev/shm.
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
"""In bytes: 64 float32 elements. No two ranks' data share a cache line, or a pair of lines that is fetched together."""


def aligned(nbytes: int) -> int:
    """Round a size or an offset up to a multiple of `ALIGNMENT`."""
    return align_up(nbytes, ALIGNMENT)


class Segment:
    """Shared memory of a fixed size, mapped into this process. New memory is all zero.

    Pages are allocated at first use. The mapping lives as long as this object or a tensor on it.
    """

    def __init__(self, fd: int) -> None:
        """Map the memory of a descriptor, and take ownership of the descriptor.

        Raises:
            UnisonoError: The memory cannot be mapped into this process.
        """
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        try:
            self.memory = mmap.mmap(fd, self.nbytes)
        except OSError as error:
            os.close(fd)
            raise UnisonoError(f"{self.nbytes} bytes of shared memory cannot be mapped: {error.strerror}") from error
        """The memory as bytes, for data that is too small to be a tensor."""
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.address = self._bytes.data_ptr()
        """The address of the memory in this process."""

    @classmethod
    def create(cls, nbytes: int, *, name: str) -> Segment:
        """Create a segment that can neither grow nor shrink.

        Args:
            nbytes: The size, rounded up to a multiple of `ALIGNMENT`, and to a page at least.
            name: The name in /proc/PID/maps.

        Raises:
            UnisonoError: The system does not provide this much memory.
        """
        fd = -1
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, max(aligned(nbytes), mmap.PAGESIZE))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise UnisonoError(f"{nbytes} bytes of shared memory cannot be had: {error.strerror}") from error
        return cls(fd)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Return a part of the memory as a contiguous tensor, whose storage is only that part.

        `offset` is in bytes from the beginning, a multiple of the dtype's size. `shape` is in elements.
        """
        numel = prod(shape)
        assert 0 <= offset <= offset + numel * dtype.itemsize <= self.nbytes
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype)
        # Not a view of one tensor over the whole memory: torch.save would write all of it with each view.
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset).view(tuple(shape))

    def close_descriptor(self) -> None:
        """Close the file descriptor, because a process may have few. The memory stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
