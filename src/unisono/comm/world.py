"""The ranks of a job as one object: who they are, and the few small exchanges that setting up a run needs.

`World.connect` joins the default process group of torch.distributed, or starts it from the environment. The traffic of
training goes through `engine`, not through here.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.placement import Placement, detect_placement
from unisono.comm.waiting import Waiter
from unisono.errors import LaunchError
from unisono.machine import let_threads_finish, usable_cores

__all__ = ["World", "own_placement"]


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
    waiter: Waiter = field(default_factory=lambda: Waiter(polls=False))
    """Waits for transfers."""

    @classmethod
    def connect(cls, device: torch.device, *, timeout_s: float = 1800.0) -> World:
        """Join the ranks of this job, starting the default process group if nobody has.

        Every rank must call it. The backend is nccl for a CUDA device and gloo otherwise; a group that the script
        has started itself is used as it is. A group started here is ended at exit.
        Raises: LaunchError if the other ranks cannot be reached, ValueError if the environment contradicts itself.
        """
        placement = own_placement()
        if not dist.is_initialized():
            if placement.world_size == 1:
                return cls(local_rank=placement.local_rank)
            _start_group(placement, device, timeout_s=timeout_s)
        size, rank = dist.get_world_size(), dist.get_rank()
        if size == 1:
            return cls(local_rank=placement.local_rank)
        wire = device if "nccl" in dist.get_backend() and device.type == "cuda" else torch.device("cpu")
        ranks_here = size if placement.launcher == "none" else placement.local_world_size
        return cls(
            rank=rank,
            size=size,
            local_rank=placement.local_rank,
            group=dist.group.WORLD,
            device=wire,
            waiter=Waiter(polls=wire.type == "cpu" and ranks_here <= usable_cores()),
        )

    def store(self, name: str) -> dist.Store:  # type: ignore[name-defined]
        """Give the store that all ranks share, under names that begin with the given one."""
        return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]

    def gather(self, value: Any) -> list[Any]:
        """Collect one picklable value of each rank, in rank order, on every rank. Every rank must call it."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_bytes(self, make: Callable[[], bytes]) -> bytes:
        """Give every rank the bytes that `make` returns on rank 0. Every rank must call it; one copy in memory."""
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


def own_placement() -> Placement:
    """Find the placement of this process."""
    return detect_placement(os.environ, parent=_parent_identity())


def _parent_identity() -> str:
    """Name the parent process so that no other, also a later one with the same id, has the name."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # not Linux, or a parent that is hidden from us
        started = "0"
    return f"{parent}-{started}"


def _start_group(placement: Placement, device: torch.device, *, timeout_s: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        if placement.meeting.startswith("file:"):
            path = _meeting_folder() / placement.meeting.removeprefix("file:")
            atexit.register(path.unlink, missing_ok=True)  # runs after the group has ended: last in, first out
            store = dist.FileStore(str(path), placement.world_size)  # type: ignore[attr-defined]
            dist.init_process_group(
                backend, store=store, rank=placement.rank, world_size=placement.world_size, timeout=timeout
            )
        else:
            dist.init_process_group(
                backend,
                init_method=placement.meeting,
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=timeout,
            )
    except dist.DistError as error:
        raise LaunchError(
            f"rank {placement.rank} of {placement.world_size} could not meet the others at "
            f"{placement.meeting or 'env://'}: {error}"
        ) from error
    atexit.register(_end_group)


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    let_threads_finish()


def _meeting_folder() -> Path:
    """Make the folder, private to this user, in which the ranks of one host meet by a file."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    folder = Path(base) / f"unisono-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat(follow_symlinks=False)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(f"{folder} belongs to somebody else or is open to others: remove it, or set TMPDIR")
    return folder
