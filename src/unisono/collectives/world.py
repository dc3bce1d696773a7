"""The ranks of a job as one object: who they are, and the few small exchanges that setting up a run needs.

`World.connect` joins the default process group of torch.distributed, or starts it from the environment. The traffic of
training goes through `engine`, not through here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.group import known_group
from unisono.collectives.object_transport import gather_values
from unisono.collectives.polling_wait import PollingWait
from unisono.job.initialize import begin_job
from unisono.job.placement import own_placement
from unisono.job.ranks import local_rank, local_world_size, world_size
from unisono.job.ranks import rank as own_rank
from unisono.machine import usable_cores

__all__ = ["World"]


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks of a job. With one process every method is local."""

    rank: int = 0
    """Global rank of this process."""
    size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """Rank among the processes of this host."""
    group: dist.ProcessGroup | None = None
    """The group that all ranks share; None with one process."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Where tensors must lie to travel: this rank's GPU under nccl, else the CPU."""
    waiter: PollingWait = field(default_factory=lambda: PollingWait(polls=False))
    """Waits for transfers."""

    @classmethod
    def connect(cls, device: torch.device, *, timeout_s: float = 1800.0) -> World:
        """Join the ranks of this job, starting the default process group if nobody has.

        Every rank must call it. The backend is nccl for a CUDA device and gloo otherwise; a group that the script
        has started itself is used as it is. A group started here is ended at exit.
        Raises: LaunchError if the other ranks cannot be reached, ValueError if the environment contradicts itself.
        """
        if not dist.is_initialized():
            placement = own_placement()
            if placement.world_size == 1:
                return cls(local_rank=placement.local_rank)
            backend = "nccl" if device.type == "cuda" else "gloo"
            begin_job(backend, timeout=timedelta(seconds=timeout_s), device=device)
        size, rank = world_size(), own_rank()
        if size == 1:
            return cls(local_rank=local_rank())
        wire = device if "nccl" in dist.get_backend() and device.type == "cuda" else torch.device("cpu")
        return cls(
            rank=rank,
            size=size,
            local_rank=local_rank(),
            group=dist.group.WORLD,
            device=wire,
            waiter=PollingWait(polls=wire.type == "cpu" and local_world_size() <= usable_cores()),
        )

    @property
    def timeout_s(self) -> float:
        """How long ranks wait for each other at most: what the process group was started with."""
        assert self.group is not None
        timeout: timedelta = self.group._get_backend(self.device).options._timeout
        return timeout.total_seconds()

    def store(self, name: str) -> dist.Store:  # type: ignore[name-defined]
        """Return the store that all ranks share, under names that begin with the given one."""
        return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]

    def gather(self, value: Any, call: str = "gathering of a Trainer") -> list[Any]:
        """Return one picklable value of each rank, in rank order. Every rank must call it.

        Args:
            value: This rank's.
            call: What the values are gathered for, alike on all ranks, for messages.

        Raises:
            RankMismatchError: Ranks gather for different things.
        """
        return [value] if self.group is None else gather_values(known_group(self.group), call, value)

    def broadcast_bytes(self, make: Callable[[], bytes]) -> bytes:
        """Return every rank the bytes that `make` returns on rank 0. Every rank must call it; one copy in memory."""
        if self.group is None:
            return make()
        content = bytearray(make()) if self.rank == 0 else bytearray()
        length = torch.tensor([len(content)], device=self.device)
        dist.broadcast(length, src=0, group=self.group)
        if not int(length.item()):
            return b""
        if self.rank == 0:
            buffer = torch.frombuffer(content, dtype=torch.uint8).to(self.device)
        else:
            buffer = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        dist.broadcast(buffer, src=0, group=self.group)
        if self.rank == 0:
            return bytes(content)
        received = buffer.cpu()
        return ctypes.string_at(received.data_ptr(), received.numel())

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Return every rank the bytes of rank 0's tensor, which is contiguous and on the CPU, in the memory of its own.

        Every rank must call it, with a tensor of the same size. No copy where tensors may travel from the CPU.
        """
        if self.group is None or not tensor.numel():
            return
        plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        buffer = plain.view(-1).view(torch.uint8)
        sent = buffer.to(self.device)
        dist.broadcast(sent, src=0, group=self.group)
        if sent is not buffer and self.rank:
            buffer.copy_(sent)
