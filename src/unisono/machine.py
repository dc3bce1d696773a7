"""What this machine gives to this process. Without torch, for the launcher needs it too."""

from __future__ import annotations

import math
import os
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores() -> int:
    """Count the cores that this process may use: its affinity, cut by the CPU quota of its control group."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota() -> float | None:
    """Find the tightest CPU quota of version 2 control groups above this process, in cores."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
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
