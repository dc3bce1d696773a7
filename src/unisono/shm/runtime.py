"""The life of a process group: meeting, the lane, the end, and what torch asks a group about itself.

What the collectives do is in `reducing` and `group`, which build on this class.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from unisono import activity
from unisono.errors import UnisonoError
from unisono.machine import usable_cores
from unisono.shm.abort_flag import AbortFlag
from unisono.shm.collective_context import CollectiveContext, Operation
from unisono.shm.executor import Executor, Submission
from unisono.shm.fingerprint import CollectiveFingerprint
from unisono.shm.handshake import handshake
from unisono.shm.peer_wait import PeerWait
from unisono.shm.point_to_point import PointToPoint
from unisono.shm.segment_layout import Options, SegmentLayout
from unisono.shm.slot_ring import SlotRing
from unisono.shm.work import Work

__all__ = ["GroupRuntime"]

_DRAIN_S = 10.0
"""What is under way when a group is destroyed may take so long to end."""
_EXIT_S = 1.0
"""The same where a program ends without having destroyed its groups."""


class GroupRuntime(dist.ProcessGroup):
    """A process group whose ranks, processes of one host, exchange data through shared memory.

    Every rank of the group must make it. Args: store is the group's own. ranks are the global ranks, by rank in the
    group; none: the same. timeout is how long a rank waits for another at most. name is for people.
    Raises: dist.DistBackendError if a rank does not come in time or is on another host.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        *,
        timeout: timedelta,
        ranks: Sequence[int] = (),
        name: str = "",
        options: Options | None = None,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch lets no subclass have the store
        self._store, self._own_rank, self._own_size = store, rank, size
        self._name, self._timeout_s = name, timeout.total_seconds()
        self._torchs_name = name
        self._settings = Options() if options is None else options
        self._ranks = list(ranks) or list(range(size))
        try:
            self._segment, self._peers = handshake(
                store,
                rank=rank,
                size=size,
                timeout_s=self._timeout_s,
                make=lambda: SegmentLayout.plan(size, self._settings).create(),
                names=self._ranks,
            )
        except UnisonoError as error:
            raise dist.DistBackendError(f"[rank {self._ranks[rank]}, group {name}] {error}") from error
        layout = SegmentLayout.of(self._segment)
        self._alarm = AbortFlag(self._segment, layout.alarm, rank=rank, size=size)
        self._waiting = PeerWait(
            self._alarm,
            self._peers,
            ranks=self._ranks,
            group=name,
            timeout_s=self._timeout_s,
            polls=_ranks_here(size) <= usable_cores(),
        )
        board = SlotRing(self._segment, layout.board, self._peers, slot_nbytes=layout.slot_nbytes)
        self._stage = CollectiveContext(board, self._waiting.names)
        self._lane = Executor(board, self._waiting, name=f"unisono-shm-{name}")
        self._mailboxes = PointToPoint(
            self._segment, layout.mail, self._peers, self._waiting, budget_nbytes=layout.mail_nbytes
        )
        self._splits = 0
        self._coalescing: list[Any] | None = None
        self._is_open, self._is_forked = True, False
        _groups.add(self)
        activity.groups.add(self)

    def _submit(self, operation: Operation, call: CollectiveFingerprint, tensors: list[Tensor], opts: Any) -> Work:
        """Put an operation into the lane. Returns: its work, which gives the tensors."""
        if not self._is_open:
            raise RuntimeError(self._why_closed())
        timeout = opts.timeout
        # torch says -1 ms for none.
        timeout_s = self._timeout_s if timeout.days < 0 else timeout.total_seconds()
        work = Work(tensors, what=call, late=self._lane.late, drive=self._lane.drive)
        stays = not opts.asyncOp and self._coalescing is None
        self._lane.submit(Submission(operation, work, timeout_s=timeout_s), stays=stays)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    # The end

    def shutdown(self) -> None:
        """Leave the group, once what is under way has ended. Peers that still wait for this rank are told."""
        self._close(_DRAIN_S)

    def abort(self) -> None:
        """Leave the group at once: what is under way fails, here and there."""
        if self._is_open:
            self._waiting.tell(f"{self._waiting.own_name} has aborted the group")
        self._close(0.5)

    def _close(self, drain_s: float) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._is_forked:
            return  # the memory and the peers are the parent's
        name = self._waiting.own_name
        if not self._lane.close(self._why_closed(), timeout_s=drain_s):
            self._waiting.tell(f"{name} has destroyed the group with a collective under way")
            self._lane.close(self._why_closed(), timeout_s=1.0)
        self._mailboxes.close()
        self._alarm.leave()
        self._peers.close()

    def _why_closed(self) -> str:
        if self._is_forked:
            return (
                f"group {self._name} belongs to the process that this one was forked from: a forked process is no rank "
                "of it. Call collectives in the parent, or start the group in each process"
            )
        return f"group {self._name} has been destroyed"

    # What torch asks

    def name(self) -> str:
        """Name the backend."""
        return "shm"

    getBackendName = _get_backend_name = name  # noqa: N815  C++ asks by this name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which torch knows the group."""
        return self._torchs_name

    def _set_group_name(self, name: str) -> None:
        self._torchs_name = name  # torch would keep it in a backend in C++, which there is none

    def rank(self) -> int:
        """Give this process's rank in the group."""
        return self._own_rank

    def size(self) -> int:
        """Count the ranks of the group."""
        return self._own_size

    def get_group_store(self) -> Any:
        """Give the group's store."""
        return self._store

    @property
    def options(self) -> Any:
        """Backend options, as far as torch wants to copy them."""
        options = c10d.Backend.Options("shm", timedelta(seconds=self._timeout_s))
        options.global_ranks_in_group = self._ranks
        return options

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if torch.device(device).type != "cpu":
            raise RuntimeError(
                f"No backend type associated with device type {torch.device(device).type}: shm is for CPUs"
            )
        return self

    supports_splitting = False
    """torch would split by a device that a group is bound to; see `split_group`."""
    supports_coalescing = False
    supports_time_estimate = False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a rank waits for another at most, in calls from now on."""
        self._timeout_s = self._waiting.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def pending(self) -> tuple[int, list[tuple[Any, float]]] | None:
        """Return what is not finished, for reports of hangs: see `unisono.activity.GroupActivity`."""
        if not self._is_open:
            return None
        now_s = time.monotonic()
        return self._stage.number, [(job.work.what, now_s - job.begin_s) for job in self._lane.under_way()]

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: calls are numbered from the beginning."""

    def _get_sequence_number_for_group(self) -> int:
        return self._stage.number


def _ranks_here(size: int) -> int:
    """Count the ranks on this host, those of other groups too: they share its cores."""
    world = dist.get_world_size() if dist.is_initialized() else size
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(size, min(world, int(here)) if here.isdigit() else world)


_groups: weakref.WeakSet[GroupRuntime] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads of groups that the program has not destroyed: one inside torch would abort the interpreter."""
    for group in list(_groups):
        group._close(_EXIT_S)


def _disown_all() -> None:
    for group in list(_groups):
        group._is_forked, group._is_open = True, False


os.register_at_fork(after_in_child=_disown_all)
