"""The environment variables of a job's ranks: those of torchrun, as scripts and libraries expect.

Pure functions. `job_environment` is the same for all ranks and must be in place before torch is imported;
`rank_environment` belongs to one rank, and so do its arguments (`program_arguments`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from unisono.variables import (
    EVENTS_VARIABLE,
    HOST_VARIABLE,
    SERVER_PAGE_VARIABLE,
    SERVER_VARIABLE,
    SERVERS_VARIABLE,
)

if TYPE_CHECKING:
    from unisono.launch.hosts.host_settings import HostPlace

__all__ = [
    "job_environment",
    "program_arguments",
    "rank_environment",
]

_OUTER = frozenset({
    EVENTS_VARIABLE, HOST_VARIABLE, SERVERS_VARIABLE, SERVER_PAGE_VARIABLE, SERVER_VARIABLE, "TORCHELASTIC_ERROR_FILE",
})  # fmt: skip
"""Variables that belong to the rank of an outer launcher, inside which this job may run."""

_LOCAL_RANK = "${local_rank}"


def job_environment(
    inherited: Mapping[str, str], *, ranks: int, cores: int, huge_pages: bool = False, interface: str = "lo"
) -> dict[str, str]:
    """Return the whole environment that all ranks of a job share.

    Variables set by the user stay. The number of threads is divided among the ranks: more threads than cores only wait.

    Args:
        huge_pages: True to make torch put CPU tensors of 2 MB and more on huge pages. That is for programs that keep
            freed memory, as those with a Trainer do: otherwise the system allocates such a tensor each time.
        interface: The network interface over which ranks reach each other; "" to let libraries choose one.

    >>> job_environment({"HOME": "/root"}, ranks=4, cores=10)["OMP_NUM_THREADS"]
    '2'
    >>> job_environment({"OMP_NUM_THREADS": "7"}, ranks=4, cores=10)["OMP_NUM_THREADS"]
    '7'
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        # With all ranks on this machine, nothing has to be reachable from outside, and a host name that resolves to an
        # address that the machine does not have cannot stop the job. For gloo, NCCL, TensorPipe (torch RPC):
        **{f"{library}_SOCKET_IFNAME": interface for library in ("GLOO", "NCCL", "TP") if interface},
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if huge_pages:
        defaults["THP_MEM_ALLOC_ENABLE"] = "1"
    kept = {name: value for name, value in inherited.items() if name not in _OUTER}
    return {**defaults, **kept}


def rank_environment(
    rank: int,
    *,
    ranks: int,
    port: int,
    run_id: str,
    role: str = "default",
    restarts: int = 0,
    max_restarts: int = 0,
    virtual_local_rank: bool = False,
    visible_gpus: str | None = None,
    signals: Iterable[int] = (),
    servers: int = 0,
    error_file: str | None = None,
    place: HostPlace | None = None,
) -> dict[str, str]:
    """Return the variables of one rank of a job.

    Args:
        rank: The number of the rank among those of this machine.
        ranks: The number of ranks of this machine.
        port: The port of the job's store on the loopback address.
        restarts: The number of times that the ranks have been restarted.
        virtual_local_rank: True to show the rank one GPU only, as number 0, and to set LOCAL_RANK to 0.
        visible_gpus: CUDA_VISIBLE_DEVICES as the user set it, None if it is not set; used with `virtual_local_rank`.
        signals: The signals that are passed to ranks.
        servers: The number of servers of embedding tables.
        error_file: The file to which elastic's `@record` writes an exception.
        place: The place of this machine among several; None if there is no other.

    >>> variables = rank_environment(1, ranks=4, port=29500, run_id="a")
    >>> variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"], variables["MASTER_PORT"]
    ('1', '1', '4', '29500')
    >>> variables = rank_environment(1, ranks=2, port=1, run_id="a", virtual_local_rank=True, visible_gpus="4,6")
    >>> variables["RANK"], variables["LOCAL_RANK"], variables["CUDA_VISIBLE_DEVICES"]
    ('1', '0', '6')
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_NAME": role,
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # Rank 0 must not listen on the port, since the job's store does.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if virtual_local_rank:
        gpu = str(rank) if visible_gpus is None else visible_gpus.split(",")[rank].strip()
        variables |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu}
    if place is not None:
        variables |= {
            "RANK": str(place.first_rank + rank),
            "ROLE_RANK": str(place.first_role_rank + rank),
            "GROUP_RANK": str(place.host),
            "WORLD_SIZE": str(place.world_size),
            "ROLE_WORLD_SIZE": str(place.role_world_size),
            "GROUP_WORLD_SIZE": str(place.hosts),
            "MASTER_ADDR": place.master_addr,
            "MASTER_PORT": str(place.master_port),
            HOST_VARIABLE: place.identity,
        }
    if names := ",".join(signal.Signals(signum).name for signum in signals):
        variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = names
    if servers:
        variables[SERVERS_VARIABLE] = str(servers)
    if error_file is not None:
        variables["TORCHELASTIC_ERROR_FILE"] = error_file
    return variables


def program_arguments(arguments: Sequence[str], *, local_rank: str, passed: bool) -> list[str]:
    """Return the program's arguments on one rank, with `${local_rank}` filled in as by torchrun.

    Args:
        local_rank: LOCAL_RANK as the rank finds it.
        passed: True to pass `--local-rank` first, for programs that expect it.

    >>> program_arguments(["--log", "out.${local_rank}"], local_rank="1", passed=True)
    ['--local-rank=1', '--log', 'out.1']
    """
    first = [f"--local-rank={local_rank}"] if passed else []
    return first + [argument.replace(_LOCAL_RANK, local_rank) for argument in arguments]
