"""Memory of zeros for tables whose rows are written when they are first updated: it exists once it is written.

The kernel gives such memory an address alone, and a page of zeros for what is read. So a tensor may have more rows than
there is memory for, as long as few of them are written.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["LEAST_NBYTES", "PAGE_NBYTES", "zero_memory"]

PAGE_NBYTES = 4096
LEAST_NBYTES = 1 << 20
"""Less is not worth a mapping."""
_NORESERVE = 0x4000
"""MAP_NORESERVE of Linux, which `mmap` lacks before Python 3.13: without it, more than there is memory is refused."""


def zero_memory(shape: Sequence[int], dtype: torch.dtype, *, small_pages: bool = False) -> Tensor:
    """Return a tensor of zeros. If it is large, it begins at a page and takes memory for the pages that are written.

    Args:
        shape: Its shape.
        dtype: Its type.
        small_pages: True to ask the kernel for pages of 4 KB, where writing to one does not make those beside it exist.

    Raises:
        MemoryError: The kernel refuses the address space, as one does that never promises more than it has.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < LEAST_NBYTES:
        return torch.zeros(tuple(shape), dtype=dtype)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError as error:
        raise MemoryError(
            f"{nbytes / 1e9:.3g} GB of address space for rows that are not written yet cannot be had "
            f"({error.strerror}). Allow overcommitting (`sysctl vm.overcommit_memory=0`), or take fewer rows."
        ) from error
    if small_pages:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(tuple(shape))
