"""The place of a process in its job, read from the environment variables that its launcher set.

`detect_placement` is pure: it maps an environment to a `Placement`; `own_placement` applies it to this process. They
know `unisono run` and torchrun (RANK, WORLD_SIZE, …), Slurm's srun, and mpirun of Open MPI, MPICH and Intel MPI; any
other process counts as a job of one rank. `job.rendezvous` finds the other ranks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from unisono import recovery_link
from unisono.machine import kernel_text

__all__ = ["Placement", "detect_placement", "own_placement"]

_OF_MPI = _OF_OPEN_MPI, _OF_MPICH = "OMPI_COMM_WORLD_RANK", "PMI_RANK"
"""The variables in which mpirun gives a process its rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The place of one process in its job."""

    launcher: str
    """Launcher of the process: "torchrun" (or one that sets the same variables), "srun", "mpirun" or "none"."""
    rank: int = 0
    """Global rank, 0 <= rank < world_size."""
    world_size: int = 1
    """Number of processes in the job."""
    local_rank: int = 0
    """Rank among the processes of this host."""
    local_world_size: int = 1
    """Number of processes of the job on this host."""
    node_rank: int = 0
    """Number of this host in the job."""
    numbered: bool = False
    """True if the launcher set both the node and the local rank, so that ranks need not compare their hosts."""
    rendezvous_url: str = ""
    """Rendezvous of the ranks: "env://", "tcp://host:port", "file:NAME" (ranks of one host), or "" (one process)."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} is outside [0, {self.world_size}): check what {self.launcher} set")

    def node_name(self, host: str) -> str:
        """Return a name of the node of this process: ranks with equal names are on one node.

        The launcher's numbers take precedence over `host`, the name of the machine: a launcher may start several nodes
        on one machine.
        """
        return f"{self.node_rank}" if self.numbered else host


def detect_placement(environ: Mapping[str, str], *, parent: str) -> Placement:
    """Return the placement of a process, by its environment. Pure: no communication, and no other rank need call it.

    Args:
        environ: The environment variables of the process.
        parent: A name of the parent process. Under MPICH on one host it names the job, for lack of another name.

    Raises:
        ValueError: A variable is missing or not a number, variables contradict each other, or the ranks of several
            hosts have no address to meet at.

    >>> detect_placement({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, parent="1").rank
    1
    >>> detect_placement({}, parent="1").launcher
    'none'
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        world_size = _integer(environ, "WORLD_SIZE")
        return Placement(
            launcher="torchrun",
            rank=_integer(environ, "RANK"),
            world_size=world_size,
            local_rank=_integer(environ, "LOCAL_RANK", default=_integer(environ, "RANK")),
            local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", default=world_size),
            node_rank=_integer(environ, "GROUP_RANK", default=0),
            numbered="LOCAL_RANK" in environ and "GROUP_RANK" in environ,
            rendezvous_url="env://" if world_size > 1 else "",
        )
    if "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        return _from_slurm(environ)
    if _OF_OPEN_MPI in environ:
        return _from_mpi(environ, _OF_OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                         "OMPI_COMM_WORLD_LOCAL_SIZE", parent=parent)  # fmt: skip
    if _OF_MPICH in environ:
        return _from_mpi(environ, _OF_MPICH, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", parent=parent)
    return Placement(launcher="none")


def own_placement() -> Placement:
    """Return the placement of this process, by its environment. No communication, and no other rank need call it.

    A spare process of the launcher waits here until it has a rank.

    Raises:
        ValueError: As `detect_placement`.
    """
    if recovery_link.current is not None:
        recovery_link.current.await_rank()
    by_mpi = any(name in os.environ for name in _OF_MPI)
    return detect_placement(os.environ, parent=_parent_identity() if by_mpi else "")  # it takes 0.1 ms to find out


def _parent_identity() -> str:
    """Return a name of the parent process that no other process has, not even a later one with the same id."""
    parent = os.getppid()
    fields = kernel_text(f"/proc/{parent}/stat").rpartition(")")[2].split()  # none if the parent is hidden
    return f"{parent}-{fields[19] if fields else '0'}"


def _from_slurm(environ: Mapping[str, str]) -> Placement:
    rank, world_size = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_NTASKS", default=1)
    nodes = _integer(environ, "SLURM_NNODES", default=1)
    job, step = environ.get("SLURM_JOB_ID", "0"), environ["SLURM_STEP_ID"]
    if world_size == 1:
        url = ""
    elif "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        url = f"tcp://{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    elif nodes == 1:
        url = f"file:slurm-{job}.{step}.{environ.get('SLURM_RESTART_COUNT', '0')}"
    else:
        hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        # Every rank must compute the same port without communication; a job id is unique on a cluster.
        port = 20_000 + (int(re.sub(r"\D", "", job) or 0) * 7 + int(re.sub(r"\D", "", step) or 0)) % 12_000
        url = f"tcp://{_first_host(hosts)}:{port}"
    return Placement(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, "SLURM_LOCALID", default=rank),
        local_world_size=_leading_count(environ.get("SLURM_STEP_TASKS_PER_NODE", ""), default=world_size // nodes),
        node_rank=_integer(environ, "SLURM_NODEID", default=0),
        numbered="SLURM_LOCALID" in environ and "SLURM_NODEID" in environ,
        rendezvous_url=url,
    )


def _from_mpi(
    environ: Mapping[str, str],
    rank_name: str,
    size_name: str,
    local_rank_name: str,
    local_size_name: str,
    *,
    parent: str,
) -> Placement:
    rank, world_size = _integer(environ, rank_name), _integer(environ, size_name)
    local_world_size = _integer(environ, local_size_name, default=world_size)
    if world_size == 1:
        url = ""
    elif "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        url = f"tcp://{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    elif local_world_size == world_size:
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "job"
        url = f"file:mpi-{re.sub(r'[^A-Za-z0-9]', '-', job)}-{parent}"
    else:
        raise ValueError(
            f"mpirun started {world_size} ranks of which {local_world_size} are on this host, and MASTER_ADDR and "
            "MASTER_PORT are not set, so the hosts cannot find each other. Export both (rank 0's host and a free "
            "port), for example: mpirun -x MASTER_ADDR=host1 -x MASTER_PORT=29500 ..."
        )
    return Placement(
        launcher="mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, local_rank_name, default=rank),
        local_world_size=local_world_size,
        # mpirun does not number nodes: OMPI_COMM_WORLD_NODE_RANK is the rank among all jobs' processes of a node.
        rendezvous_url=url,
    )


def _integer(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"the launcher set a rank but not {name}: set it, or start with `unisono run`")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the environment is not a whole number") from None


def _first_host(hosts: str) -> str:
    """Return the first host of a Slurm node list.

    >>> _first_host("gpu[003-005,9],cpu1")
    'gpu003'
    """
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", hosts)
    if match is None:
        raise ValueError(f"SLURM_STEP_NODELIST={hosts!r} names no host: export MASTER_ADDR and MASTER_PORT instead")
    return match[1] + (match[2] or "")


def _leading_count(text: str, *, default: int) -> int:
    """Return the first count of Slurm's "4(x2),3". Hosts may have different counts; `init` counts the ranks itself."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else default
