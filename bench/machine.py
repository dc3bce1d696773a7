"""What the figures were measured with: the machine, without its name, and versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

__all__ = ["describe_machine", "describe_versions", "load"]


def describe_machine() -> str:
    """Name the processor, its cores that we may use, the memory and the kernel."""
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{_processor()}, {cores} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}"


def describe_versions() -> str:
    """Name the versions of Python, torch and unisono, and of torchft if it is here."""
    names = ["torch", "unisono", *(["torchft"] if find_spec("torchft") is not None else [])]
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)])


def load() -> str:
    """Say how busy the machine is; before a measurement it should not be."""
    mean = os.getloadavg()[0]
    cores = len(os.sched_getaffinity(0))
    return f"load average {mean:.2f} on {cores} cores" + (", NOT QUIET" if mean > 0.25 * cores else "")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
