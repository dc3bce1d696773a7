"""The usage of running processes as the kernel and NVIDIA's driver know it: CPU time, waits for a core, and memory."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from unisono.launch.hang.stacks import read_state
from unisono.machine import kernel_text

__all__ = ["Usage", "gpu_memory", "main_thread_s", "parse_gpu_memory", "read_usage"]

_PATIENCE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """The usage of a process until now."""

    state: str
    """As `hang.stacks.read_state` names it."""
    cpu_s: float
    """CPU time of all its threads."""
    delay_s: float
    """How long its main thread was ready to run, and had no core; 0 where the kernel does not count it."""
    memory: int
    """Bytes that are resident in main memory, with what it shares with other processes."""


def read_usage(pid: int) -> Usage:
    """Return what a process has used; its state is "ended" if there is none."""
    state = read_state(pid)
    delays = kernel_text(f"/proc/{pid}/schedstat").split()
    return Usage(
        state=state.state,
        cpu_s=state.cpu_s,
        delay_s=int(delays[1]) / 1e9 if len(delays) > 1 else 0.0,
        memory=state.memory,
    )


def main_thread_s(pid: int) -> float:
    """Return the CPU time of the main thread of a process, to the microsecond; 0 where the kernel does not tell."""
    used = kernel_text(f"/proc/{pid}/schedstat").split()
    return int(used[0]) / 1e9 if used else 0.0


def gpu_memory() -> Mapping[int, int]:
    """Return the bytes that each process uses on all NVIDIA GPUs, by process; empty without nvidia-smi or GPUs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        done = subprocess.run(
            [program, "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_gpu_memory(done.stdout) if done.returncode == 0 else {}


def parse_gpu_memory(table: str) -> Mapping[int, int]:
    """Read nvidia-smi's lines of process and MiB; those without a number, such as [N/A], are left out.

    >>> parse_gpu_memory("71, 100\\n71, 20\\n72, [N/A]\\n")
    {71: 125829120}
    """
    found: dict[int, int] = {}
    for line in table.splitlines():
        pid, _, mebibytes = (part.strip() for part in line.partition(","))
        if pid.isdigit() and mebibytes.isdigit():
            found[int(pid)] = found.get(int(pid), 0) + (int(mebibytes) << 20)
    return found
