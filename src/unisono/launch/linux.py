"""The launcher's requests to the Linux kernel: which processes die together, and which are left.

Python has no calls for `prctl` and `tgkill`, so they go through ctypes. Start reading at `set_parent_death_signal`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress

from unisono.launch.cleanup import Leftovers
from unisono.machine import kernel_text
from unisono.polling import pauses

__all__ = [
    "become_subreaper",
    "descendants",
    "end_descendants",
    "ends_at_once",
    "is_dying",
    "process_status",
    "set_parent_death_signal",
    "signal_main_thread",
]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def set_parent_death_signal(signum: int) -> None:
    """Make the kernel send this process a signal when its parent dies; 0 cancels that.

    A parent that died before the call sends nothing: compare `os.getppid()` with the expected parent afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def become_subreaper() -> None:
    """Make this process the new parent of descendants whose own parent ends, so that all stay in reach."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(root: int) -> list[int]:
    """List the children of a process, their children and so on, parents first, zombies included."""
    children: dict[int, list[int]] = {}
    for folder in os.scandir("/proc"):
        if folder.name.isdigit() and (parent := _parent(int(folder.name))) is not None:
            children.setdefault(parent, []).append(int(folder.name))
    found = list(children.get(root, ()))
    for pid in found:  # the list grows while it is read
        found += children.get(pid, ())
    return found


def ends_at_once(pid: int, signum: int) -> bool:
    """Return True if a termination signal ends the process at once: the process neither handles nor ignores it."""
    fields = process_status(pid)
    handled = (int(fields.get(name, "0"), 16) >> (signum - 1) & 1 for name in ("SigCgt", "SigIgn"))
    return bool(fields) and not any(handled)


def is_dying(pid: int) -> bool:
    """Return True if the kernel is ending a process: it writes its core dump, or has taken its memory."""
    fields = process_status(pid)
    if fields and "VmSize" not in fields:
        return "VmSize" in process_status(os.getpid())  # otherwise this system does not tell
    return fields.get("CoreDumping") == "1"


def process_status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status as texts; none if there is no such process."""
    lines = kernel_text(f"/proc/{pid}/status").splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


def end_descendants(
    *,
    spare: Collection[int] = (),
    leftovers: Leftovers | None = None,
    hurry: bool = False,
    timeout_s: float = 5.0,
) -> list[int]:
    """Kill and reap all descendants of this process, including those started meanwhile, and remove their files.

    Only a subreaper reaches orphans. Children in `spare` are left alone, with their descendants. Helpers that clean up
    after the others get the time for that, less in a hurry.

    Returns:
        The processes that are left at the timeout: those of another user, or stuck in the kernel.
    """
    begin_s = time.monotonic()
    pauses_s = pauses(0.0005, 0.02)
    leftovers = leftovers or Leftovers()
    # A subreaper without children has no descendants; looking at all processes of the machine takes long.
    while _has_children():
        spared = {*spare, *(pid for kept in spare for pid in descendants(kept))}
        left = [pid for pid in descendants(os.getpid()) if pid not in spared]
        for pid in left:
            if leftovers.note(pid, hurry=hurry) <= time.monotonic() - begin_s:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # a grandchild: its parent dies in this round, so it is ours in the next
                os.waitpid(pid, os.WNOHANG)
        if not left or time.monotonic() - begin_s > timeout_s:
            break
        time.sleep(next(pauses_s))
    else:
        left = []
    leftovers.remove()
    return left


def signal_main_thread(pid: int, signum: int) -> bool:
    """Send a signal to the main thread of a process; return False if this user has no such process.

    While the main thread has yet to run for an earlier signal, the kernel delivers a signal for the process to another
    thread. Python's handlers wait for the main thread, which that does not wake.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):  # glibc before 2.30
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
            return True
        return False
    return bool(libc.tgkill(pid, pid, signum) == 0)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _parent(pid: int) -> int | None:
    # The name of the program is in parentheses and may itself contain spaces and parentheses.
    fields = kernel_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else None


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")
