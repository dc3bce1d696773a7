"""Who this process is: its ranks, asked for anywhere and at any time.

After `unisono.init` the answer is the job's. Before, it is the default group's of torch.distributed if the script has
made one, else what the launcher left in the environment; without a launcher this is rank 0 of 1.
"""

from __future__ import annotations

import torch.distributed as dist

from unisono.job.current import Job, current_job
from unisono.job.placement import Placement, own_placement

__all__ = ["is_main", "local_rank", "local_world_size", "node_rank", "rank", "world_size"]


def rank() -> int:
    """Give the number of this process in its job, from 0."""
    return _here().rank


def world_size() -> int:
    """Give the number of processes in the job."""
    return _here().world_size


def local_rank() -> int:
    """Give the number of this process among those of its node, from 0: the number of its GPU."""
    return _here().local_rank


def local_world_size() -> int:
    """Give the number of processes of the job on this node."""
    return _here().local_world_size


def node_rank() -> int:
    """Give the number of this node in the job, from 0; torchrun calls it group rank."""
    return _here().node_rank


def is_main(*, local: bool = False) -> bool:
    """Say whether this is rank 0, which writes logs and files. Args: local asks for the first rank of each node."""
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
    # What the script said itself; until init() asks the others, all are taken to be on this host.
    return Placement(launcher="none", rank=found, world_size=size, local_rank=found, local_world_size=size)
