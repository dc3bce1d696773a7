"""What tests ask of the kernel for which Python has no calls."""

from __future__ import annotations

import ctypes
import os
import select
from collections.abc import Iterable
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_NAMESPACES = 0x00020000 | 0x04000000 | 0x40000000  # of mounts, of the host's name, of the network
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2 << 20


def set_subreaper(on: bool) -> None:
    """Let this process become the parent of descendants whose own one ends from now on, or no longer."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def enter_namespaces(pid: int) -> None:
    """Go to the host of another process: its network, its name, and what it finds in /etc."""
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.pidfd_open(pid)
    if libc.setns(file, _NAMESPACES) != 0:
        raise OSError(ctypes.get_errno(), f"setns to the namespaces of process {pid}")
    os.close(file)


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


def use_huge_pages() -> None:
    """Move this process's own memory into huge pages, as far as the kernel has them.

    To fork a process that has imported torch, and to end it, then takes a third of the time: what has to be copied and
    taken back are the entries of its page tables.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, file, *_ = line.split()
        if access == "rw-p" and file == "0":
            start, end = (int(address, 16) for address in place.split("-"))
            for page in range(-(-start // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE):
                libc.madvise(page, _HUGE_PAGE, _MADV_COLLAPSE)  # fails where nothing is, and in older kernels


def wait_for_any(pids: Iterable[int], timeout_s: float) -> None:
    """Return when one of some children has ended, or after the timeout."""
    files = [os.pidfd_open(pid) for pid in pids]
    ended = select.poll()
    for file in files:
        ended.register(file, select.POLLIN)
    ended.poll(max(0.0, timeout_s) * 1000)
    for file in files:
        os.close(file)
