"""The transport of one model's gradients: the process group that sums them over ranks, and the waits for it.

On the CPU each model has a separate group. So its messages may interleave with those of other models, of SyncBatchNorm,
or of the program, in a different order on each rank, and are never matched with the wrong ones. Groups of GPUs are
shared: each costs memory on the device. So are groups of some ranks with torch 2.14, which names the groups that follow
otherwise on ranks that have made one among themselves: ranks would wait for each other in the next `new_group`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import TimedWait, waited
from unisono.collectives import object_transport
from unisono.collectives.group import known_group
from unisono.collectives.polling_wait import PollingWait
from unisono.collectives.serialization import serialize
from unisono.machine import usable_cores
from unisono.polling import Backoff

__all__ = ["GradientTransport"]

_LATE_S = 0.003
"""Seconds within which an all-reduce in this thread pays: as long as shm polls before it sleeps. A thread that polls
longer takes the core from others."""


class GradientTransport:
    """Sums gradients over the ranks of a process group, and sends the values that `replicate` compares."""

    def __init__(self, group: dist.ProcessGroup, *, own: bool, polls: bool) -> None:
        self.group, self._own = group, own
        self.rank, self.size = group.rank(), group.size()
        self._waiter = PollingWait(polls=polls)
        self._stays = group.name() == "shm"
        self._staying = Backoff()

    @classmethod
    def open(
        cls, group: dist.ProcessGroup, devices: Iterable[torch.device], *, timeout: timedelta | None
    ) -> GradientTransport:
        """Make the group for tensors of these devices. Every rank of the group must call it.

        Args:
            group: The ranks that train together. If a device is not the CPU, it is used itself.
            devices: The devices of the gradients.
            timeout: How long to wait for other ranks in a new group; None means the timeout of `group`.
        """
        ranks = dist.get_process_group_ranks(group)
        whole = group is dist.group.WORLD
        if any(device.type != "cpu" for device in devices) or (not whole and torch.__version__ >= "2.14"):
            return cls(group, own=False, polls=False)
        made = dist.new_group(
            ranks,
            timeout=timeout or group._get_backend(torch.device("cpu")).options._timeout,
            backend=_cpu_backend(group),
            use_local_synchronization=not whole,
        )
        # shm polls internally where that pays.
        polls = dist.get_world_size() <= usable_cores() and made.name() == "gloo"
        return cls(made, own=True, polls=polls)

    def close(self) -> None:
        """Destroy the group if `open` made it."""
        if self._own and dist.is_initialized() and self.group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(self.group)

    def all_reduce(self, tensor: Tensor, what: str, *, stays: bool = False) -> Any:
        """Begin to sum a tensor over ranks, in place, and return a handle for `wait`.

        Args:
            tensor: The tensor.
            what: The name of the transfer, for messages.
            stays: True if the caller waits immediately afterwards. Then shm sums in this thread, which is quicker while
                ranks arrive at about the same time. While they do not, this is skipped, as `PollingWait` skips polling.
        """
        if stays and self._stays:
            if not self._staying.left:
                begin_s = time.perf_counter()
                with self._explained(what), TimedWait(waited) if waited.is_on else nullcontext():
                    dist.all_reduce(tensor, group=self.group)
                self._staying.note(paid=time.perf_counter() - begin_s <= _LATE_S)
                return None
            self._staying.left -= 1
        return dist.all_reduce(tensor, group=self.group, async_op=True)

    def wait(self, work: Any, what: str) -> None:
        """Wait for the end of a transfer.

        Args:
            work: A handle that `all_reduce` returned, or the future of a communication hook.
            what: The name of the transfer, for messages.

        Raises:
            RuntimeError: The transfer failed. The type is that of the backend's error; the message has `what`.
        """
        with self._explained(what):
            if isinstance(work, torch._C.Future):
                with TimedWait(waited) if waited.is_on else nullcontext():
                    work.wait()
            elif work is not None:
                self._waiter.wait(work)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # DistBackendError is one
            # The same type, by which programs and launchers distinguish a lost peer from other errors.
            raise type(error)(
                f"{what} did not come together over {self.size} ranks: {error}\nEvery rank must run the same number "
                "of backward passes; for ranks with fewer batches than others there is replicas.join()."
            ) from error

    def gather(self, value: Any, call: str) -> list[Any]:
        """Return one picklable value of each rank, in rank order. Every rank must call it.

        Args:
            value: The value of this rank.
            call: The purpose, for messages.
        """
        return object_transport.gather_values(known_group(self.group), call, value)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill a tensor with the values it has on one rank of the group. Every rank must call it."""
        dist.broadcast(tensor, group_src=source, group=self.group)

    def broadcast_value(self, value: Any, source: int, call: str) -> Any:
        """Return one rank's picklable value. Every rank must call it.

        Args:
            value: The value of the source; ignored on other ranks.
            source: The number of the rank within the group.
            call: The purpose, for messages.
        """
        link = known_group(self.group)
        sent = serialize(value) if self.rank == source else None
        return object_transport.broadcast(link, call, sent, source).open()


def _cpu_backend(group: dist.ProcessGroup) -> str | None:
    """Return the name of the backend that a group uses for CPU tensors; None for torch's default."""
    name = str(dist.get_backend(group))
    if ":" in name:
        name = dict(part.split(":") for part in name.split(",")).get("cpu", "gloo")
    return None if name == "undefined" else name
