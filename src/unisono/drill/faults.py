"""The effect of each kind of fault on a process."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

__all__ = ["inject", "send"]

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "segv": signal.SIGSEGV,
}


def inject(kind: str, pid: int) -> bool:
    """Inject a fault of a kind of `KINDS` into a process; return False if it has ended."""
    if kind == "oom":
        return _limit_memory(pid)
    return send(pid, _SIGNALS[kind])


def send(pid: int, signum: int) -> bool:
    """Send a signal to a process; return False if it has ended."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


def _limit_memory(pid: int) -> bool:
    """Keep a process from getting more address space than it has."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), hard))
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return False
    return True
