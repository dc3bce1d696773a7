"""What tests ask of the kernel for which Python has no calls."""

from __future__ import annotations

import ctypes
import os

_PR_SET_CHILD_SUBREAPER = 36


def set_subreaper(on: bool) -> None:
    """Let this process become the parent of descendants whose own one ends from now on, or no longer."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def mark_memory(name: str) -> None:
    """Map a page of this name, which processes that are forked share and /proc/PID/maps shows."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    size = os.sysconf("SC_PAGE_SIZE")
    file = os.memfd_create(name)
    os.ftruncate(file, size)
    read = shared = 1
    if libc.mmap(None, size, read, shared, file, 0) == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    os.close(file)
