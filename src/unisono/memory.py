"""Evidence that the kernel killed a process for lack of memory, from the counters that it keeps.

A process that is killed cannot say why. The kernel counts such kills per control group (cgroup v1 and v2) and for the
machine; counters from the start of the job are compared with those after the failure. Start reading at `evidence`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from unisono.machine import kernel_text

__all__ = ["MemoryCounters", "evidence", "read_counters"]

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2⁶³."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _ControlGroup:
    """One control group: this process's own or one that contains it."""

    kills: int
    """Processes in it that were killed for lack of memory, whichever limit was the reason."""
    refusals: int
    """Times that its own limit was reached and nothing could be freed."""
    limit: int | None
    """Its limit in bytes; None without one."""
    full: bool = False
    """True if its limit was reached at some time. For cgroup v1 alone, where newer kernels count no refusals."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCounters:
    """The kernel's counters so far. Those that cannot be read are left out."""

    groups: Mapping[str, _ControlGroup] = field(default_factory=dict)
    """By folder, from this process's own group outwards."""
    kills: int | None = None
    """Processes killed for lack of memory on the whole machine."""
    machine_bytes: int | None = None
    """Memory of the machine."""
    shared_bytes: int | None = None
    """Size of /dev/shm."""


def read_counters(root: Path = Path("/")) -> MemoryCounters:
    """Read the counters for this process, which cover its children too. Takes well under a millisecond."""
    groups: dict[str, _ControlGroup] = {}
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                groups |= _read_groups(root / mount, path, version=2)
        elif "memory" in controllers.split(","):
            groups |= _read_groups(root / "sys/fs/cgroup/memory", path, version=1)
    shared = None
    with suppress(OSError):
        system = os.statvfs(root / "dev/shm")
        shared = system.f_blocks * system.f_frsize
    total = _fields(root / "proc/meminfo").get("MemTotal:")
    return MemoryCounters(
        groups=groups,
        kills=_fields(root / "proc/vmstat").get("oom_kill"),
        machine_bytes=None if total is None else total << 10,
        shared_bytes=shared,
    )


def evidence(code: int, before: MemoryCounters, after: MemoryCounters) -> str | None:
    """Return the evidence for a lack of memory as a sentence, given the exit code of the failed rank; None without any.

    >>> before = MemoryCounters(kills=0, machine_bytes=8 << 30)
    >>> evidence(-9, before, MemoryCounters(kills=1, machine_bytes=8 << 30))
    'out of memory: the kernel killed 1 process of this machine (8 GiB) during the job'
    """
    own = next(iter(after.groups), None)
    killed = _grown(before, after, own) if own is not None else 0
    if killed:
        why = _limit_reached(before, after)
        return f"out of memory: the kernel killed {_processes(killed)} of this control group; {why}"
    # If this process's group has counted no kill, a kill on the machine was another container's.
    if own is None and before.kills is not None and after.kills is not None and after.kills > before.kills:
        size = f" ({_size(after.machine_bytes)})" if after.machine_bytes else ""
        return (
            f"out of memory: the kernel killed {_processes(after.kills - before.kills)} of this machine{size} "
            "during the job"
        )
    if code == -signal.SIGBUS and after.shared_bytes is not None:
        return f"/dev/shm has {_size(after.shared_bytes)} in all; when it is full, this signal is how a program is told"
    return None


def _read_groups(mount: Path, path: str, *, version: int) -> dict[str, _ControlGroup]:
    """Read the group at a path below a mount and the groups that contain it. In a container the path may not exist."""
    found = {}
    peak = None
    here = Path(path.lstrip("/"))
    for folder in dict.fromkeys(mount / part for part in (here, *here.parents)):
        if version == 2:
            events = _fields(folder / "memory.events")
            kills, refusals, limit = events.get("oom_kill"), events.get("oom", 0), _number(folder / "memory.max")
        else:
            kills = _fields(folder / "memory.oom_control").get("oom_kill")
            refusals = _number(folder / "memory.failcnt") or 0
            limit, peak = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.max_usage_in_bytes")
        if kills is not None:
            limit = limit if limit is not None and limit < _UNLIMITED else None
            full = limit is not None and peak is not None and peak >= limit * 0.99
            found[str(folder)] = _ControlGroup(kills=kills, refusals=refusals, limit=limit, full=full)
    return found


def _grown(before: MemoryCounters, after: MemoryCounters, folder: str) -> int:
    now, then = after.groups[folder], before.groups.get(folder)
    return now.kills - then.kills if then is not None else 0


def _limit_reached(before: MemoryCounters, after: MemoryCounters) -> str:
    for folder, now in after.groups.items():
        then = before.groups.get(folder)
        if then is not None and now.limit is not None and (now.full or now.refusals > then.refusals):
            return f"the limit of {_size(now.limit)} was reached"
    size = f" ({_size(after.machine_bytes)})" if after.machine_bytes else ""
    return f"the memory of the machine{size} was full"


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"


def _size(nbytes: int) -> str:
    """Return a size in a unit that people read.

    >>> _size(64 << 20), _size(int(7.63 * (1 << 30))), _size(16 << 30)
    ('64 MiB', '7.6 GiB', '16 GiB')
    """
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f}".removesuffix(".0") + f" {unit}"
    return f"{round(nbytes / (1 << 20))} MiB"


def _fields(file: Path) -> dict[str, int]:
    pairs = [line.split() for line in kernel_text(file).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _number(file: Path) -> int | None:
    text = kernel_text(file).strip()
    return int(text) if text.isdigit() else None
