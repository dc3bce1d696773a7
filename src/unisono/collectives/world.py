"""The ranks of a job as one object, with the few small exchanges that setting up a run needs.

`World.connect` joins the default process group of torch.distributed, or starts it from the environment. The traffic of
training goes through `engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import Wait
from unisono.collectives.framing import to_bytes
from unisono.collectives.freed_wait import run_collective
from unisono.collectives.group import known_group
from unisono.collectives.object_transport import gather, gather_values
from unisono.collectives.polling_wait import PollingWait
from unisono.collectives.serialization import serialize
from unisono.errors import PeerError
from unisono.job.current import confirm_group
from unisono.job.default_group import make_subgroup
from unisono.job.initialize import begin_job
from unisono.job.placement import own_placement
from unisono.job.ranks import local_rank, local_world_size, world_size
from unisono.job.ranks import rank as own_rank
from unisono.job.rejoin import begin_as_new_rank, is_new_rank
from unisono.machine import usable_cores

__all__ = ["World", "as_bytes"]


_TIMEOUT_S = 1800.0


@dataclass(kw_only=True, slots=True)
class World:
    """The ranks of a job. Without a group, every method is local."""

    rank: int = 0
    """Global rank of this process."""
    size: int = 1
    """Number of ranks."""
    local_rank: int = 0
    """Rank among the processes of this host."""
    group: dist.ProcessGroup | None = None
    """The group of all ranks; None with one process, and on a new rank that has not joined the others yet."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """The device from which tensors travel: this rank's GPU under nccl, otherwise the CPU."""
    waiter: PollingWait = field(default_factory=lambda: PollingWait(polls=False))
    """Waits for transfers."""

    @classmethod
    def connect(cls, device: torch.device, *, timeout_s: float = _TIMEOUT_S) -> World:
        """Join the ranks of this job. Every rank must call it. A rank that takes the place of one that died is alone.

        Uses the default process group of torch.distributed if it exists. Otherwise starts it, as `unisono.init()` does
        with "auto", and ends it at exit. Traffic, in that case: that of `unisono.init`, over the store.

        Args:
            device: The device on which this rank computes.
            timeout_s: Seconds that ranks wait for each other in a group that is started here.

        Raises:
            LaunchError: The other ranks cannot be reached, or a rank has no such GPU.
            PeerError: A rank does not come in time, or cannot continue.
            RankMismatchError: Ranks pass different types of devices.
            ValueError: The environment contradicts itself.
        """
        if is_new_rank():
            job = begin_as_new_rank()
            return cls(rank=job.rank, size=job.world_size, local_rank=job.local_rank)
        if not dist.is_initialized():
            placement = own_placement()
            if placement.world_size == 1:
                return cls(local_rank=placement.local_rank)
            begin_job("auto", timeout=timedelta(seconds=timeout_s), device=device)
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
            waiter=_waiter(wire),
        )

    def wait_for(self, peer: int) -> Wait:
        """Return how observers see this rank wait for another one in a step.

        Args:
            peer: The rank, as the group counts it.
        """
        assert self.group is not None
        return Wait("Trainer.step", self.group.group_name, self.size, 0, dist.get_global_rank(self.group, peer))

    def on_cpu(self) -> World:
        """Return the same ranks with tensors that travel from the CPU. Every rank must call it.

        Returns:
            This world if they can. Otherwise another one, with a group of its own over gloo.
        """
        cpu = torch.device("cpu")
        if self.group is None or cpu in self.group._device_types:
            return self if self.device == cpu else replace(self, device=cpu, waiter=_waiter(cpu))
        timeout = self.group._get_backend(self.group._device_types[0]).options._timeout
        group = make_subgroup(range(self.size), timeout=timeout, backend="gloo")
        return replace(self, group=group, device=cpu, waiter=_waiter(cpu))

    def new_group(self) -> dist.ProcessGroup:
        """Make another group of all ranks, of the kind of this one. Every rank must call it."""
        assert self.group is not None
        backend = None if self.group is dist.group.WORLD else dist.get_backend(self.group)
        made = make_subgroup(range(self.size), timeout=timedelta(seconds=self.timeout_s), backend=backend)
        assert made is not None
        return made

    def renew(self, other: World) -> None:
        """Become another world, for everybody who holds this one."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    @property
    def timeout_s(self) -> float:
        """Seconds that ranks wait for each other at most: the timeout of the process group, if there is one."""
        if self.group is None:
            return _TIMEOUT_S
        timeout: timedelta = self.group._get_backend(self.device).options._timeout
        return timeout.total_seconds()

    def store(self, name: str) -> dist.Store:  # type: ignore[name-defined]
        """Return the store that all ranks share, with `name` as a prefix of all keys. Local; one process has one."""
        if self.group is None:
            return dist.HashStore()  # type: ignore[attr-defined]
        return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]

    def gather(self, value: Any, call: str = "gathering of a Trainer") -> list[Any]:
        """Return one picklable value of each rank, in rank order. Every rank must call it.

        Memory and traffic are those of `unisono.comm.all_gather`.

        Args:
            value: The value of this rank.
            call: The purpose of the call, equal on all ranks, for messages.

        Raises:
            TypeError: The value cannot be pickled.
            PeerError: The value of another rank cannot be pickled, or not be unpickled here.
            RankMismatchError: Ranks gather for different purposes.
        """
        return [value] if self.group is None else gather_values(known_group(self.group), call, value)

    def gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return equally many numbers of each rank, in rank order. Every rank must call it.

        Quicker than `gather`, since it compares nothing: use it where all ranks are known to be at the same place.
        Traffic: an all-gather of 8 bytes a number.

        Args:
            numbers: Those of this rank; whole ones must be below 2^53.
        """
        if self.group is None:
            return [[*numbers]]
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        found = [torch.empty_like(own) for _ in range(self.size)]
        run_collective(dist.all_gather, found, own, group=self.group)
        confirm_group()
        of_ranks: list[list[float]] = torch.stack(found).tolist()
        return of_ranks

    def gather_to_main(self, value: Any, call: str) -> list[Any] | None:
        """Return one picklable value of each rank on rank 0, in rank order; None elsewhere. Every rank must call it.

        Args:
            value: The value of this rank.
            call: The purpose of the call, equal on all ranks, for messages.

        Raises:
            RankMismatchError: Ranks gather for different purposes.
        """
        if self.group is None:
            return [value]
        received = gather(known_group(self.group), call, serialize(value), 0)
        return None if received is None else [one.open() for one in received]

    def broadcast_bytes(self, make: Callable[[], bytes], *, source: int = 0) -> bytes:
        """Return on every rank the bytes that `make` returns on one rank. Every rank must call it.

        Traffic: a broadcast of the length, in 8 bytes, and one of the bytes if there are any. Memory: twice the bytes.

        Args:
            make: Called on the rank `source` alone.
            source: That rank.

        Raises:
            PeerError: On the other ranks, if `make` raises an exception, which that rank raises then.
        """
        if self.group is None:
            return make()
        content, failure = bytearray(), None
        if self.rank == source:
            try:
                content = bytearray(make())
            except Exception as error:  # of any class: it is raised once the other ranks know
                failure, content = error, bytearray(f"{type(error).__name__}: {error}".encode())
        length = torch.tensor([len(content) if failure is None else -len(content)], device=self.device)
        run_collective(dist.broadcast, length, group_src=source, group=self.group)
        confirm_group()
        number = int(length.item())
        if not number:
            return b""
        buffer = torch.frombuffer(content or bytearray(abs(number)), dtype=torch.uint8).to(self.device)
        run_collective(dist.broadcast, buffer, group_src=source, group=self.group)
        confirm_group()
        if failure is not None:
            raise failure
        sent = to_bytes(buffer)
        if number < 0:
            raise PeerError(f"rank {source} failed where the other ranks await what it finds: {sent.decode()}")
        return sent

    def broadcast_tensor(self, tensor: Tensor, *, source: int = 0) -> None:
        """Overwrite a tensor with that of one rank. Every rank must call it, with a tensor of the same size in bytes.

        Traffic: a broadcast of the tensor's bytes. Memory: no copy if tensors travel from the CPU, otherwise one on the
        GPU.

        Args:
            tensor: A contiguous tensor.
            source: The rank whose values all get.
        """
        if self.group is None or not tensor.numel():
            return
        buffer = as_bytes(tensor)
        sent = buffer.to(self.device)
        run_collective(dist.broadcast, sent, group_src=source, group=self.group)
        confirm_group()
        if sent is not buffer and self.rank != source:
            buffer.copy_(sent)


def _waiter(wire: torch.device) -> PollingWait:
    """Return what waits for transfers of tensors on a device."""
    return PollingWait(polls=wire.type == "cpu" and local_world_size() <= usable_cores())


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a vector that shares its memory."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.view(-1).view(torch.uint8)
