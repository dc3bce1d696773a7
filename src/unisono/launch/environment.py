"""The environment variables of a job's ranks: those of torchrun, so that scripts and libraries find what they expect.

Pure functions. `job_environment` is the same for all ranks and must be in place before torch is imported;
`rank_environment` belongs to one rank.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["EVENTS_VARIABLE", "job_environment", "rank_environment"]

EVENTS_VARIABLE = "UNISONO_EVENTS_FD"
"""Holds the number of the open pipe to which rank 0 writes progress events, one JSON object per line."""


def job_environment(inherited: Mapping[str, str], *, ranks: int, cores: int) -> dict[str, str]:
    """Give the whole environment that all ranks of a job share.

    What the user has set stays. The number of threads is divided among the ranks: more threads than cores only wait.

    >>> job_environment({"HOME": "/root"}, ranks=4, cores=10)["OMP_NUM_THREADS"]
    '2'
    >>> job_environment({"OMP_NUM_THREADS": "7"}, ranks=4, cores=10)["OMP_NUM_THREADS"]
    '7'
    """
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        # All ranks are on this machine, so nothing has to be reachable from outside, and a host name that resolves
        # to an address the machine does not have cannot stop the job.
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    # An outer launcher's pipe is not ours to write to.
    kept = {name: value for name, value in inherited.items() if name != EVENTS_VARIABLE}
    return {**defaults, **kept}


def rank_environment(
    rank: int, *, ranks: int, port: int, run_id: str, restarts: int = 0, max_restarts: int = 0
) -> dict[str, str]:
    """Give the variables of one rank of a job on one machine.

    Args: port is where the job's store listens on the loopback address; restarts counts how often ranks were replaced.

    >>> variables = rank_environment(1, ranks=4, port=29500, run_id="a")
    >>> variables["RANK"], variables["LOCAL_RANK"], variables["WORLD_SIZE"], variables["MASTER_PORT"]
    ('1', '1', '4', '29500')
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "ROLE_WORLD_SIZE": str(ranks),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # Rank 0 must not listen on the port too: the job's store does.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
