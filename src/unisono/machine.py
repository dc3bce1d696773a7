"""The host of this process, its cores, memory and threads. Does not import torch, for the launcher."""

from __future__ import annotations

import ctypes
import math
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from unisono.variables import HOST_VARIABLE

__all__ = [
    "available_bytes",
    "file_system_of",
    "give_memory_back",
    "host_id",
    "kernel_text",
    "let_threads_finish",
    "read_ahead",
    "resident_bytes",
    "shared_memory_obstacle",
    "usable_cores",
]

_MADV_WILLNEED = 3


def kernel_text(path: Path | str) -> str:
    """Return the text of a kernel file, such as one in /proc.

    It is empty if there is none: on another system, in another version of the kernel, in a container that hides it, or
    for a process that has ended.
    """
    with suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def host_id(*, with_network: bool = False) -> str:
    """Return a name of the running system: the same in all its containers, and new at every boot.

    The host name replaces whatever the system hides. A launcher of several hosts has the last word on which ranks are
    on different ones.

    Args:
        with_network: True to distinguish the networks within the system too. Containers may have one each, and abstract
            sockets do not reach from one to another.
    """
    system = kernel_text("/proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
    if named := os.environ.get(HOST_VARIABLE):
        system = f"{system} {named}"
    if not with_network:
        return system
    try:
        return f"{system} {Path('/proc/self/ns/net').readlink()}"
    except OSError:
        return f"{system} {socket.gethostname()}"


def usable_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by its control group's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def let_threads_finish(timeout_s: float = 1.0) -> None:
    """Wait until the other threads of this process are asleep. Call it last before the interpreter ends.

    A thread of gloo that drops its last tensor at that moment needs the interpreter, does not get it any more, and
    aborts the process, although the program has succeeded. Returns when all other threads have been seen asleep twice:
    those of gloo need less than a millisecond and a free core. If threads go on computing, it waits until the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    calm = 0
    while calm < 2 and time.monotonic() < deadline_s:
        time.sleep(0.001)  # without the interpreter, so that others can take it
        calm = calm + 1 if _all_others_sleep() else 0


def available_bytes() -> int | None:
    """Return the memory that can be taken without swapping, as the kernel estimates it; None where it does not."""
    for line in kernel_text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def file_system_of(path: Path) -> str | None:
    """Return the kind of the file system of a path, such as "ext4" or "nfs4"; None if the system does not tell."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in kernel_text("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            return after.split()[0]
    return None


def read_ahead(address: int, nbytes: int) -> None:
    """Let the kernel read a part of a mapped file from the disk while this process goes on. Other memory is left alone.

    Where rows are read at random, a mapping has no read-ahead of its own: a pass over 128 MiB that were on the disk
    alone took 7.5 s, and 0.8 s with this.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    begin = address // page * page
    if sys.platform == "linux" and nbytes > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(address + nbytes - begin), _MADV_WILLNEED)


def resident_bytes() -> int | None:
    """Return the bytes of main memory that this process uses, with shared pages; None if the system does not tell."""
    pages = kernel_text("/proc/self/statm").split()[1:2]
    return int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else None


def _all_others_sleep() -> bool:
    own = os.getpid()  # also the id of the main thread
    for task in Path("/proc/self/task").iterdir() if Path("/proc/self/task").is_dir() else ():
        if int(task.name) != own:
            with suppress(OSError):  # it has just ended
                # The state follows the name, which is in parentheses and may contain anything.
                if (task / "stat").read_text(errors="replace").rpartition(") ")[2][0] not in "SDTZ":
                    return False
    return True


def _quota() -> float | None:
    """Return the tightest CPU quota of the version 2 control groups around this process, in cores; None without one."""
    lines = kernel_text("/proc/self/cgroup").splitlines()
    root = Path("/sys/fs/cgroup")
    quotas: list[float] = []
    for path in (line.removeprefix("0::").lstrip("/") for line in lines if line.startswith("0::")):
        for group in (root / path, *(root / path).parents):
            if not group.is_relative_to(root):
                break
            try:
                limit, period = (group / "cpu.max").read_text().split()
            except (OSError, ValueError):  # the root group has no such file
                continue
            if limit != "max":
                quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def shared_memory_obstacle() -> str | None:
    """Return why this rank cannot share memory with others of its host at all; None if it can."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "this system has no memfd_create or pidfd_open, which Linux has"
    try:
        os.close(os.memfd_create("unisono"))
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"memfd_create or pidfd_open is not allowed here: {error}"
    return None


def give_memory_back() -> None:
    """Return free memory to the system if the C library is glibc, whose heap keeps what lies between used blocks."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
