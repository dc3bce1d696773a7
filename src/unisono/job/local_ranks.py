"""Local ranks and the backend of a job, from the hosts and GPUs that its ranks report.

Pure, except that `own_gpu` asks this process's torch, and `can_share_memory` this system. `job.initialize` exchanges
the values between ranks.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Sequence

import torch

from unisono.errors import LaunchError, RankMismatchError
from unisono.job.placement import Placement
from unisono.machine import shared_memory_obstacle
from unisono.text import name_ranks
from unisono.variables import CPU_BACKEND_VARIABLE

__all__ = ["can_share_memory", "choose_backend", "own_gpu", "place_on_hosts"]

_GROUP_NBYTES = 64 << 20
"""The memory of a group of the backend "shm". It counts as a file, whose size `ulimit -f` may limit."""


def own_gpu(device: torch.device) -> str | None:
    """Return this rank's GPU as NCCL tells GPUs apart; None without a GPU.

    That is its UUID, which does not depend on its number in this process, and the host that NCCL_HOSTID names: ranks
    for which this differs may share a GPU, over sockets.
    """
    if device.type != "cuda":
        return None
    return f"{torch.cuda.get_device_properties(device).uuid} {os.environ.get('NCCL_HOSTID', '')}".rstrip()


def place_on_hosts(hosts: Sequence[str], *, launcher: str = "none") -> list[Placement]:
    """Return the placement of each rank, given the name of its host. Hosts are numbered in order of appearance.

    >>> [(p.local_rank, p.local_world_size, p.node_rank) for p in place_on_hosts(["a", "b", "a"])]
    [(0, 2, 0), (0, 1, 1), (1, 2, 0)]
    """
    numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
    sizes, taken = Counter(hosts), Counter[str]()
    placements = []
    for rank, host in enumerate(hosts):
        placements.append(
            Placement(
                launcher=launcher,
                rank=rank,
                world_size=len(hosts),
                local_rank=taken[host],
                local_world_size=sizes[host],
                node_rank=numbers[host],
            )
        )
        taken[host] += 1
    return placements


def choose_backend(
    asked: Sequence[str],
    *,
    hosts: Sequence[str],
    gpus: Sequence[str | None],
    cpu_backend: str | None,
    shares_memory: bool = True,
) -> tuple[str, str | None]:
    """Choose the backend of a job from the requests, hosts and GPUs of all ranks: the same on every rank.

    Args:
        asked: The backend that each rank requested: "auto" or a name of torch's.
        hosts: The name of each rank's host.
        gpus: Each rank's GPU, as `own_gpu` names it, or None.
        cpu_backend: The value of UNISONO_CPU_BACKEND.
        shares_memory: False if some rank cannot share memory with others of its host.

    Returns:
        The backend, and a remark about the choice for rank 0 to print, or None.

    Raises:
        RankMismatchError: Ranks requested different backends.
        LaunchError: The backend cannot work with these GPUs, or only some ranks have one.
        ValueError: `cpu_backend` is neither "gloo" nor "shm".

    >>> choose_backend(["auto", "auto"], hosts=["a", "a"], gpus=[None, None], cpu_backend=None)
    ('shm', None)
    >>> choose_backend(["auto", "auto"], hosts=["a", "b"], gpus=[None, None], cpu_backend=None)
    ('gloo', None)
    >>> choose_backend(["auto", "auto"], hosts=["a", "b"], gpus=["x", "y"], cpu_backend=None)
    ('nccl', None)
    """
    if len(set(asked)) > 1:
        listed = ", ".join(f"rank {rank}: {name!r}" for rank, name in enumerate(asked[:8]))
        raise RankMismatchError(f"ranks asked for different backends ({listed}): give init() the same on every rank")
    without = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    shared = [rank for rank, gpu in enumerate(gpus) if gpu is not None and gpus.count(gpu) > 1]
    if "nccl" in asked[0]:
        if without:
            raise LaunchError(
                f"backend={asked[0]!r} needs a GPU for every rank, and {name_ranks(without)} of {len(gpus)} found "
                'none: use backend="auto", or "gloo"'
            )
        if shared:
            raise LaunchError(
                f"{name_ranks(shared)} share a GPU, which nccl does not serve: start one rank per GPU, and leave "
                'the number out of device="cuda:0"; or use backend="gloo"'
            )
    if asked[0] != "auto":
        return asked[0], None
    if without and len(without) < len(gpus):
        raise LaunchError(
            f"{name_ranks(without)} of {len(gpus)} found no GPU and the others did: give every rank one, or call "
            'init(device="cpu") on all'
        )
    if not without:
        if not shared:
            return "nccl", None
        return "gloo", (
            f"{name_ranks(shared)} share a GPU, which nccl does not serve, so the backend is gloo: start one rank per "
            "GPU, or choose yourself with init(backend=...)"
        )
    if cpu_backend not in (None, "", "gloo", "shm"):
        raise ValueError(f'{CPU_BACKEND_VARIABLE}={cpu_backend!r} in the environment must be "gloo" or "shm"')
    if cpu_backend:
        return cpu_backend, None
    return ("shm" if len(set(hosts)) == 1 and shares_memory else "gloo"), None


def can_share_memory() -> bool:
    """Return True if this process can be in a group of the backend "shm"."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    has_room = limit == resource.RLIM_INFINITY or limit >= _GROUP_NBYTES
    return has_room and shared_memory_obstacle() is None
