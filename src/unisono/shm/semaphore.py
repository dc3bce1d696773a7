"""Counting semaphores in shared memory, by which one process wakes another that waits for it.

POSIX orders memory around them: a process whose `wait` consumed a `post` sees everything written before that `post`.
In glibc a post is an atomic addition with release order, and a wait a compare-and-swap with acquire order, on both x86
and arm64. Plain stores from Python have no such order on arm64, so no flag in this package is one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import time
from functools import cache

__all__ = ["SEMAPHORE_NBYTES", "Semaphore"]

SEMAPHORE_NBYTES = 64
"""One cache line. glibc's sem_t takes 32 bytes of it."""

_CLOCK_MONOTONIC = 1


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _no_sleep() -> ctypes.PyDLL:
    """Return the C library for calls that return immediately: they keep the GIL."""
    library = ctypes.PyDLL(None)
    for function in (library.sem_post, library.sem_trywait):
        function.argtypes = [ctypes.c_void_p]
    library.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    return library


@cache
def _may_sleep() -> ctypes.CDLL:
    """Return the C library for calls that may sleep: they release the GIL."""
    library = ctypes.CDLL(None, use_errno=True)
    library.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return library


class Semaphore:
    """A semaphore at an address in shared memory. One process initializes it by `create`, before others use it.

    Every `post` lets one `wait` succeed. `owner` is an object to keep alive as long as this one: the memory, unless
    the user of the semaphore keeps that.
    """

    __slots__ = ("_address", "_owner", "_post", "_try")

    def __init__(self, address: int, owner: object = None) -> None:
        self._address, self._owner = ctypes.c_void_p(address), owner
        self._post, self._try = _no_sleep().sem_post, _no_sleep().sem_trywait

    def create(self) -> None:
        """Initialize the semaphore, with the value 0."""
        _no_sleep().sem_init(self._address, 1, 0)

    def post(self) -> None:
        """Increment the value, and wake a thread that waits. Takes less than 1 µs, or a few if a thread sleeps."""
        self._post(self._address)

    def try_wait(self) -> bool:
        """Decrement the value if it is positive. Return True if it was decremented."""
        return not self._try(self._address)

    def wait(self, timeout_s: float) -> bool:
        """Decrement the value, and sleep for at most `timeout_s` until that is possible. Return True if it was done."""
        end_s = time.monotonic() + timeout_s
        until = _Time(int(end_s), int(end_s % 1 * 1e9))
        if not _may_sleep().sem_clockwait(self._address, _CLOCK_MONOTONIC, ctypes.byref(until)):
            return True
        code = ctypes.get_errno()
        if code in (errno.ETIMEDOUT, errno.EINTR):
            return False
        raise OSError(code, os.strerror(code))
