"""The job of this process: its ranks as one process group, the lookup of the current job, and its end.

There is one job at a time, as there is one default group in torch.distributed. `job.initialize` begins it; `job.ranks`
returns the rank of this process, also before that. Start reading at `Job`.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from unisono.errors import GroupError
from unisono.job.connection_watch import ConnectionWatch
from unisono.job.default_group import Sockets
from unisono.job.group_watch import GroupWatch
from unisono.job.placement import own_placement
from unisono.job.rendezvous_file import one_at_a_time
from unisono.job.store_exchange import StoreExchange, wait_for_keys
from unisono.job.user_function import refuse_collective
from unisono.machine import let_threads_finish

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Job", "NotMember", "RecoverableCalls", "current_job", "require_group"]

T = TypeVar("T")

_LINGER_S = 5.0
"""Seconds that rank 0 waits for the other ranks at the end of a job whose store its process hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The ranks that `init` brought together, and the place of this process among them.

    As a context manager it ends the job on exit, if the call of `init` that returned it began the job.
    """

    rank: int
    """Global rank of this process, 0 <= rank < world_size."""
    world_size: int
    """Number of processes in the job."""
    local_rank: int
    """Rank of this process among those of its node."""
    local_world_size: int
    """Number of processes of the job on this node."""
    node_rank: int
    """Number of this node in the job; torchrun calls it group rank."""
    num_nodes: int
    """Number of nodes in the job."""
    device: torch.device
    """Device on which this rank computes. If it is a GPU, it is also torch's current one."""
    backend: str
    """Backend that moves tensors: "nccl", "gloo", "shm", ..."""
    launcher: str
    """Launcher of the process: "torchrun" (or one that sets the same variables, such as `unisono run`), "srun",
    "mpirun" or "none"."""
    timeout: timedelta
    """How long a rank waits for the others."""
    number: int = field(repr=False)
    """Number of the job among those of this process."""
    began: bool = field(default=False, compare=False, repr=False)
    """True if the call of `init` that returned this object began the job."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks, torch.distributed's default group; GroupError after the end of the job."""
        group = self._require_active().group
        if group is None:
            raise GroupError("this rank takes the place of one that died, and has not joined the others yet")
        return group

    def end(self) -> None:
        """End the job, with its group and all subgroups. Does nothing if the job has ended already."""
        if current_job() == self:
            _end()

    def store(self, name: str) -> dist.Store:  # type: ignore[name-defined]
        """Return the store that all ranks share, with `name` as a prefix of all keys.

        Raises:
            GroupError: The job has ended.
        """
        return dist.PrefixStore(name, self._require_active().store)  # type: ignore[attr-defined]

    def exchange(self, name: str, value: Any, *, doing: str) -> list[Any]:
        """Return one JSON value of every rank, in rank order. Every rank must call it, in the same order for a name.

        It uses the store and not the group: for checks and set-up, not for training.

        Args:
            name: The use; its calls are counted.
            value: The value of this rank. An exception, for a rank that cannot go on, is raised here after the other
                ranks have received it.
            doing: Completes "rank 1 did not ..." in errors.

        Raises:
            PeerError: A rank does not call within the timeout, or passed an exception.
            GroupError: The job has ended, or a loss function is running.
        """
        refuse_collective()
        store_exchange = StoreExchange(
            self.store("exchange"),
            f"{name}/{self.next_number(name)}",
            rank=self.rank,
            size=self.world_size,
            timeout_s=self.timeout.total_seconds(),
        )
        return store_exchange.exchange(value, doing=doing)

    def next_number(self, name: str) -> int:
        """Return how often a name was used before in this job: equal on all ranks that use it in the same order."""
        counts = self._require_active().counts
        counts[name] += 1
        return counts[name] - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.began and current_job() == self:
            _end(linger=kind is None)

    def _require_active(self) -> ActiveJob:
        if current_job() != self or _active is None:
            raise GroupError("the job has ended: call unisono.init() on all ranks again")
        return _active


class NotMember(int):
    """The value that `subgroup` returns on a rank outside the group.

    It equals torch's `GroupMember.NON_GROUP_MEMBER`, and is neither None nor false, which torch would take for the
    group of all ranks.
    """

    description: str

    def __new__(cls, description: str) -> Self:
        """Make the mark; `description` is the group's name in errors."""
        made = super().__new__(cls, dist.GroupMember.NON_GROUP_MEMBER)
        made.description = description
        return made

    def __repr__(self) -> str:
        return f"<not in {self.description}>"

    __str__ = __repr__


class RecoverableCalls(Protocol):
    """Makes calls in which ranks need each other, and makes them again after ranks have been replaced."""

    def take_turn(self, body: Callable[[Callable[[], None]], T]) -> T | None:
        """Make a call in which ranks wait for one of them, and return its result. Every rank must make it.

        Args:
            body: Makes the call. It gets a function to call while it waits, whose errors it lets pass.

        Returns:
            The result; None if this is a new rank and the others have not made the call.
        """


@dataclass(kw_only=True, slots=True)
class ActiveJob:
    """A job in progress, beside its description, `Job`: its group and store, and the request that began it."""

    job: Job
    group: dist.ProcessGroup | None
    """None on a new rank that has not joined the others yet."""
    asked: str
    """The backend that was requested, which may be "auto"."""
    where: str | None
    """The init_method that began the job."""
    store: dist.Store  # type: ignore[name-defined]
    """The store that all ranks share, with a prefix that only this job uses."""
    hosted: bool
    """True if rank 0's process hosts the store, so that the other ranks need that process to the end."""
    file: Path | None = None
    """Where the store is, if that is a file."""
    connections: Sockets = frozenset()
    """The connections of the group."""
    adopted: bool = False
    """True if the script made the group."""
    watch: GroupWatch | ConnectionWatch | None = None
    """Frees this rank when another one has died, if operations of the group would wait for that one for ever."""
    calls: Callable[[], RecoverableCalls | None] = lambda: None
    """Returns those of the Trainer, if there is one and it survives the death of other ranks."""
    pid: int = field(default_factory=os.getpid)
    counts: Counter[str] = field(default_factory=Counter)


_active: ActiveJob | None = None
_ended_size = 1
_registered = False


def current_job() -> Job | None:
    """Return the job of this process; None before `init` and after the end. In a forked process: the parent's job."""
    global _active  # noqa: PLW0603  one job per process, as torch has one default group
    if _active is None:
        return None
    if dist.group.WORLD is not _active.group:
        _active = None  # the script called destroy_process_group
        return None
    return _active.job


def active_job() -> ActiveJob | None:
    """Return the job of this process with its group and store, or None."""
    return None if current_job() is None else _active


def confirm_group() -> None:
    """Check that no rank had aborted the group of this job before all that has been started on it has ended.

    To be called before anything that came over the group is used. With backends whose operations fail when a rank has
    died, it does nothing.

    Raises:
        PeerError: A rank may have: the launcher replaces one.
    """
    if _active is not None and _active.watch is not None:
        _active.watch.confirm()


def guard_group(is_guarded: Callable[[], bool]) -> None:
    """Let the group of this job be aborted, where that is needed, if `is_guarded` returns True; see `GroupWatch`."""
    if _active is not None and _active.watch is not None:
        _active.watch.is_guarded = is_guarded


def connection_watch() -> ConnectionWatch | None:
    """Return what frees threads that wait for operations of this job's groups, if their backend needs that."""
    watch = None if _active is None else _active.watch
    return watch if isinstance(watch, ConnectionWatch) else None


def is_cut_off() -> bool:
    """Return True if ranks abort the group of this job, since the launcher has made a decision."""
    return _active is not None and _active.watch is not None and _active.watch.is_cut_off


def set_active_job(active: ActiveJob) -> None:
    """Make a job that has begun the current one of this process, and end it at exit."""
    global _active, _registered  # noqa: PLW0603  see current_job
    _active = active
    if not _registered:
        _registered = True
        atexit.register(_end_at_exit)


def is_group_of_script() -> bool:
    """Return True if the script has made the process group that there is."""
    active = active_job()
    return dist.is_initialized() if active is None else active.adopted


def require_group(group: dist.ProcessGroup | int | None = None) -> dist.ProcessGroup | None:
    """Return the group of an operation; None if this process is alone and has no group.

    Args:
        group: A group, or None for the whole job.

    Raises:
        GroupError: The ranks have not met, the job or the group has ended, this rank is not in the group, or a loss
            function is running.
        TypeError: The argument is no group.
    """
    refuse_collective()
    if group is None:
        world = dist.group.WORLD
        if world is None:
            refuse_lone_rank()
        return world
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        what = group.description if isinstance(group, NotMember) else "the group"
        raise GroupError(f"this rank is not in {what}: call operations of a group on its members alone")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group={group!r} is no process group: give one of unisono.subgroup, unisono.split or torch")
    if store_of(group) is None:
        raise GroupError("the group has ended: groups end with their job, make it again after unisono.init()")
    return group


def store_of(group: dist.ProcessGroup) -> Any:
    """Return the store of a group; None if the group has ended."""
    entry = dist.distributed_c10d._world.pg_map.get(group)
    return None if entry is None else entry[1]


def refuse_lone_rank() -> None:
    """Raise GroupError if this process is one of several ranks and has no group."""
    if dist.is_initialized():
        return
    if _ended_size > 1:
        raise GroupError(
            f"the job of {_ended_size} ranks has ended in this process: call unisono.init() on all ranks again"
        )
    placement = own_placement()
    if placement.world_size > 1:
        raise GroupError(
            f"this is rank {placement.rank} of {placement.world_size}, and the ranks have not met: call unisono.init() "
            "on all ranks first"
        )


def _end(*, linger: bool = True) -> None:
    global _active, _ended_size  # noqa: PLW0603  see current_job
    if _active is None:
        return
    active, _active = _active, None
    _ended_size = active.job.world_size
    if active.watch is not None:
        active.watch.stop()
    if dist.is_initialized():
        let_threads_finish()  # a thread of gloo that still holds a tensor would hang the end of a DDP model
        dist.destroy_process_group()
    # After an exception, rank 0 does not wait for the others. Python sets last_value when it prints an exception.
    if linger and getattr(sys, "last_value", None) is None:
        _linger(active)
    with one_at_a_time(active.file):
        del active  # and with it the store


def _linger(active: ActiveJob) -> None:
    """Keep the store of rank 0's process until the other ranks have ended the job, for at most `_LINGER_S`.

    They may still have to read entries that rank 0 has left there, such as the end of its turn in `main_first`.
    """
    size = active.job.world_size
    if not active.hosted or size == 1:
        return
    try:
        active.store.set(f"ended/{active.job.rank}", "")
        if active.job.rank == 0:
            wait_for_keys(active.store, [f"ended/{rank}" for rank in range(size)], time.monotonic() + _LINGER_S)
    except dist.DistError:
        return  # rank 0 has ended: no rank needs the store


def _end_at_exit() -> None:
    if _active is None or _active.pid != os.getpid():
        return
    if current_job() is not None:
        _end()
    let_threads_finish()
