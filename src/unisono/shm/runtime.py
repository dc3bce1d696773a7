"""The parts of a process group over shared memory, from the handshake of its ranks to its shutdown.

`GroupRuntime` knows nothing of torch's process groups: `process_group` is what torch calls.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unisono import activity
from unisono.errors import UnisonoError
from unisono.machine import usable_cores
from unisono.shm.abort_flag import AbortFlag
from unisono.shm.collective_context import CollectiveContext, Prepared
from unisono.shm.collective_executor import CollectiveExecutor, Submission
from unisono.shm.handshake import handshake
from unisono.shm.peer_wait import PeerWait
from unisono.shm.point_to_point import PointToPoint
from unisono.shm.segment_layout import Options, SegmentLayout
from unisono.shm.slot_ring import SlotRing
from unisono.shm.work import Work

__all__ = ["GroupRuntime"]

_DRAIN_S = 10.0
"""How long to wait for pending operations when a group is destroyed."""
_EXIT_S = 1.0
"""How long to wait when a program ends without having destroyed its groups."""


class GroupRuntime:
    """The segment, the slots, the executor and the messages of one rank of a group.

    Every rank of the group must create it.

    Args:
        store: The store of this group.
        rank: The rank of this process in the group.
        size: The number of ranks in the group.
        timeout: How long a rank waits for another one.
        ranks: The global ranks, by rank in the group. If empty, they are the ranks in the group.
        name: The group's name, for errors.
        options: Settings of the group.

    Raises:
        dist.DistBackendError: A rank died, did not come in time or is on another host, or there is too little memory.
        ValueError: `options.mib` is too small for the group. Raised on rank 0; other ranks get a DistBackendError.
        RuntimeError: Rank 0 has a different version of unisono.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, timeout: timedelta, ranks: Sequence[int], name: str, options: Options
    ) -> None:
        self.store, self.rank, self.size, self.name = store, rank, size, name
        self.group_name = name
        """The name under which torch knows the group."""
        self.timeout_s = timeout.total_seconds()
        self.options = options
        self.ranks = list(ranks) or list(range(size))
        try:
            self._segment, self._peers = handshake(
                store,
                rank=rank,
                size=size,
                timeout_s=self.timeout_s,
                make=lambda: SegmentLayout.plan(size, self.options).create(),
                names=self.ranks,
            )
        except UnisonoError as error:
            raise dist.DistBackendError(f"[rank {self.ranks[rank]}, group {name}] {error}") from error
        layout = SegmentLayout.of(self._segment)
        self._abort_flag = AbortFlag(self._segment, layout.abort_flag, rank=rank, size=size)
        self.waiting = PeerWait(
            self._abort_flag,
            self._peers,
            ranks=self.ranks,
            group=name,
            timeout_s=self.timeout_s,
            polls=_ranks_here(size) <= usable_cores(),
        )
        slots = SlotRing(self._segment, layout.slots, self._peers, slot_nbytes=layout.slot_nbytes)
        self.context = CollectiveContext(slots, self.ranks)
        self._executor = CollectiveExecutor(slots, self.waiting, name=f"unisono-shm-{name}")
        self.point_to_point = PointToPoint(
            self._segment, layout.messages, self._peers, self.waiting, budget_nbytes=layout.messages_nbytes
        )
        self.coalesced: list[Any] | None = None
        """The works of the current coalesced call; None outside of one."""
        self._is_open, self._is_forked = True, False
        _runtimes.add(self)
        activity.groups.add(self)

    def submit(self, prepared: Prepared, opts: Any) -> Work:
        """Run a collective, or queue it. Return its work, whose result is its tensors."""
        if not self._is_open:
            raise RuntimeError(self._why_closed())
        operation, call, tensors = prepared
        timeout = opts.timeout
        # torch passes -1 ms for no timeout.
        timeout_s = self.timeout_s if timeout.days < 0 else timeout.total_seconds()
        executor = self._executor
        work = Work(tensors, what=call, late=executor.late, drive=executor.run_until)
        executor.submit(
            Submission(operation, work, timeout_s=timeout_s), stays=not opts.asyncOp and self.coalesced is None
        )
        return work if self.coalesced is None else self.coalesce(work)

    def coalesce(self, work: Any) -> Any:
        """Add a work to the current coalesced call, if any, and return it."""
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a rank waits for another one in later calls."""
        self.timeout_s = self.waiting.timeout_s = timeout.total_seconds()

    def pending(self) -> tuple[int, list[tuple[Any, float]]] | None:
        """Return the pending calls, for reports of hangs: see `unisono.activity.GroupActivity`."""
        if not self._is_open:
            return None
        now_s = time.monotonic()
        return self.context.number, [(each.work.what, now_s - each.begin_s) for each in self._executor.pending()]

    def abort(self) -> None:
        """Close the group immediately: pending operations fail, on all ranks."""
        if self._is_open:
            self.waiting.abort(f"{self.waiting.own_name} has aborted the group")
        self.close(drain_s=0.5)

    def close(self, *, drain_s: float = _DRAIN_S) -> None:
        """Close the group, once pending operations have ended. Peers that still wait for this rank get an error."""
        if not self._is_open:
            return
        self._is_open = False
        if self._is_forked:
            return  # the memory and the peers are the parent's
        if not self._executor.close(self._why_closed(), timeout_s=drain_s):
            self.waiting.abort(f"{self.waiting.own_name} has destroyed the group with a collective under way")
            self._executor.close(self._why_closed(), timeout_s=1.0)
        self.point_to_point.close()
        self._abort_flag.leave()
        self._peers.close()

    def disown(self) -> None:
        """Mark the group as unusable in a forked process, which is not a rank of it."""
        self._is_forked, self._is_open = True, False

    def _why_closed(self) -> str:
        if self._is_forked:
            return (
                f"group {self.name} belongs to the process that this one was forked from: a forked process is no rank "
                "of it. Call collectives in the parent, or start the group in each process"
            )
        return f"group {self.name} has been destroyed"


def _ranks_here(size: int) -> int:
    """Return the number of ranks on this host, including those of other groups, which share its cores."""
    world = dist.get_world_size() if dist.is_initialized() else size
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(size, min(world, int(here)) if here.isdigit() else world)


_runtimes: weakref.WeakSet[GroupRuntime] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads of groups that were not destroyed: one inside torch would abort the interpreter at exit."""
    for runtime in list(_runtimes):
        runtime.close(drain_s=_EXIT_S)


def _disown_all() -> None:
    for runtime in list(_runtimes):
        runtime.disown()


os.register_at_fork(after_in_child=_disown_all)
