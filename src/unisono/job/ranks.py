"""The ranks of this process. The functions can be called anywhere and at any time, without communication.

After `unisono.init` the values are the job's. Before, they come from the default group of torch.distributed if the
script has made one, otherwise from the launcher's environment variables; without a launcher this is rank 0 of 1. All
functions raise ValueError if variables that a launcher set are invalid.
"""

from __future__ import annotations

import torch.distributed as dist

from unisono.job.current import Job, current_job
from unisono.job.placement import Placement, own_placement

__all__ = ["is_main", "local_rank", "local_world_size", "node_rank", "rank", "world_size"]


def rank() -> int:
    """Return the global rank of this process, from 0."""
    return _here().rank


def world_size() -> int:
    """Return the number of processes in the job."""
    return _here().world_size


def local_rank() -> int:
    """Return the rank of this process among those of its node, from 0: the number of its GPU."""
    return _here().local_rank


def local_world_size() -> int:
    """Return the number of processes of the job on this node."""
    return _here().local_world_size


def node_rank() -> int:
    """Return the number of this node in the job, from 0; torchrun calls it group rank."""
    return _here().node_rank


def is_main(*, local: bool = False) -> bool:
    """Return True on rank 0, which writes logs and files.

    Args:
        local: Return True on the first rank of each node instead.
    """
    here = _here()
    return (here.local_rank if local else here.rank) == 0


def _here() -> Job | Placement:
    job = current_job()
    if job is not None:
        return job
    placement = own_placement()
    if not dist.is_available() or not dist.is_initialized():
        return placement
    found, size = dist.get_rank(), dist.get_world_size()
    if (found, size) == (placement.rank, placement.world_size):
        return placement
    # The ranks are the script's; until init() compares hosts, all ranks are assumed to be on this one.
    return Placement(launcher="none", rank=found, world_size=size, local_rank=found, local_world_size=size)
