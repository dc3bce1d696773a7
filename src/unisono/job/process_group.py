"""Makes torch.distributed's default group from a rendezvous."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from unisono.errors import LaunchError
from unisono.job.rendezvous import Rendezvous

__all__ = ["make_group"]


def make_group(backend: str, meeting: Rendezvous, timeout: timedelta, device: torch.device) -> None:
    """Make the default group. Every rank must call it.

    Raises:
        LaunchError: Torch could not make it.
    """
    try:
        if backend == "mpi":  # mpi numbers the ranks
            dist.init_process_group("mpi", timeout=timeout)
            return
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("default_pg", meeting.store),  # type: ignore[attr-defined]
            rank=meeting.rank,
            world_size=meeting.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"rank {meeting.rank} of {meeting.world_size} could not make a group by {backend!r}: {error}"
        ) from error
