"""The system's limits for a job: open files and processes. Start reading at `check_open_files`."""

from __future__ import annotations

import errno
import resource
from contextlib import suppress
from pathlib import Path

from unisono.errors import LaunchError
from unisono.machine import kernel_text

__all__ = ["check_open_files", "describe_failed_fork"]


def check_open_files(ranks: int, *, spares: int = 0, servers: int = 0) -> None:
    """Check that the launcher may open the files that the ranks of a job need.

    Args:
        ranks: The number of ranks.
        spares: The number of spare processes, which need as many each.
        servers: The number of servers of embedding tables, which need as many each.

    Raises:
        LaunchError: The limit is lower.
    """
    per_rank, ours = 8, 48  # pipes, pages and log files of a rank; files of the interpreter and the agent
    needed = per_rank * (ranks + spares + servers) + ours
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and needed > limit:
        what, in_all = (f"{ranks} ranks and {spares} spare ones", " in all") if spares else (f"{ranks} ranks", "")
        raise LaunchError(
            f"{what} need {needed} open files, and the limit is {limit}; raise it with `ulimit -n {needed}`, or start "
            f"at most {max(1, (limit - ours) // per_rank)} ranks{in_all}"
        )


def describe_failed_fork(error: OSError) -> str:
    """Return the reason why no process could be started, with the limits that can be its cause and a remedy.

    Args:
        error: The exception of `os.fork` or `subprocess.Popen`.

    Returns:
        A clause such as "fork failed with EAGAIN (Resource temporarily unavailable); ...".
    """
    name = errno.errorcode.get(error.errno or 0, str(error.errno))
    failed = f"fork failed with {name} ({error.strerror})"
    if error.errno == errno.ENOMEM:
        return f"{failed}: the system has no memory for another process; start fewer ranks"
    found = "; ".join(_limits())
    limits = f" ({found})" if found else ""
    return (
        f"{failed}: a limit of processes is reached{limits}; end other processes, raise the limit, or start fewer ranks"
    )


def _limits() -> list[str]:
    """List the limits on the number of processes that apply to this process."""
    found = []
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit != resource.RLIM_INFINITY:
        found.append(f"ulimit -u is {limit}")
    for group in _pid_groups():
        with suppress(OSError):
            most = (group / "pids.max").read_text().strip()
            if most != "max":
                found.append(f"{(group / 'pids.current').read_text().strip()} of {most} used in control group {group}")
    return found


def _pid_groups() -> list[Path]:
    """List the control groups, of either version, that can limit the number of this process's processes."""
    groups = []
    for line in kernel_text("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            root = Path("/sys/fs/cgroup") / controllers
            group = root / path.lstrip("/")
            groups += [place for place in (group, *group.parents) if place.is_relative_to(root)]
    return groups
