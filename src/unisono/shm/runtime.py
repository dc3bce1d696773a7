"""What a process group over shared memory consists of, from the handshake of its ranks to their leaving.

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
from unisono.shm.executor import Executor, Submission
from unisono.shm.handshake import handshake
from unisono.shm.peer_wait import PeerWait
from unisono.shm.point_to_point import PointToPoint
from unisono.shm.segment_layout import Options, SegmentLayout
from unisono.shm.slot_ring import SlotRing
from unisono.shm.work import Work

__all__ = ["GroupRuntime"]

_DRAIN_S = 10.0
"""How long pending operations may take to end when a group is destroyed."""
_EXIT_S = 1.0
"""The same where a program ends without having destroyed its groups."""


class GroupRuntime:
    """The segment, the slots, the executor and the messages of one rank of a group.

    Every rank of the group must create it.

    Args:
        store: The group's own store.
        rank: Rank of this process in the group.
        size: Number of ranks in the group.
        timeout: How long a rank waits for another at most.
        ranks: The global ranks, by rank in the group. Empty: the same numbers.
        name: The group's name, for errors.
        options: Settings of the group.

    Raises:
        dist.DistBackendError: A rank does not come in time or is on another host.
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
        self.store, self.rank, self.size, self.name = store, rank, size, name
        self.group_name = name
        """The name under which torch knows the group."""
        self.timeout_s = timeout.total_seconds()
        self.options = Options() if options is None else options
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
        self._executor = Executor(slots, self.waiting, name=f"unisono-shm-{name}")
        self.point_to_point = PointToPoint(
            self._segment, layout.messages, self._peers, self.waiting, budget_nbytes=layout.messages_nbytes
        )
        self.coalesced: list[Any] | None = None
        """The works of a coalesced call that is being made; None outside of one."""
        self._is_open, self._is_forked = True, False
        _runtimes.add(self)
        activity.groups.add(self)

    def submit(self, prepared: Prepared, opts: Any) -> Work:
        """Run a collective, or see that it will be run. Return its work, whose result are the tensors."""
        if not self._is_open:
            raise RuntimeError(self._why_closed())
        operation, call, tensors = prepared
        timeout = opts.timeout
        # torch says -1 ms for none.
        timeout_s = self.timeout_s if timeout.days < 0 else timeout.total_seconds()
        executor = self._executor
        work = Work(tensors, what=call, late=executor.late, drive=executor.run_until)
        executor.submit(
            Submission(operation, work, timeout_s=timeout_s), stays=not opts.asyncOp and self.coalesced is None
        )
        return work if self.coalesced is None else self.coalesce(work)

    def coalesce(self, work: Any) -> Any:
        """Return a work, which has been added to the coalesced call that is being made, if any."""
        if self.coalesced is not None:
            self.coalesced.append(work)
        return work

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long a rank waits for another at most, in calls from now on."""
        self.timeout_s = self.waiting.timeout_s = timeout.total_seconds()

    def pending(self) -> tuple[int, list[tuple[Any, float]]] | None:
        """Return what is not finished, for reports of hangs: see `unisono.activity.GroupActivity`."""
        if not self._is_open:
            return None
        now_s = time.monotonic()
        return self.context.number, [(each.work.what, now_s - each.begin_s) for each in self._executor.pending()]

    def abort(self) -> None:
        """Leave the group at once: pending operations fail, on all ranks."""
        if self._is_open:
            self.waiting.abort(f"{self.waiting.own_name} has aborted the group")
        self.close(drain_s=0.5)

    def close(self, *, drain_s: float = _DRAIN_S) -> None:
        """Leave the group, once pending operations have ended. Peers that still wait for this rank get an error."""
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
        """Give the group up in a forked process, which is no rank of it."""
        self._is_forked, self._is_open = True, False

    def _why_closed(self) -> str:
        if self._is_forked:
            return (
                f"group {self.name} belongs to the process that this one was forked from: a forked process is no rank "
                "of it. Call collectives in the parent, or start the group in each process"
            )
        return f"group {self.name} has been destroyed"


def _ranks_here(size: int) -> int:
    """Count the ranks on this host, those of other groups too: they share its cores."""
    world = dist.get_world_size() if dist.is_initialized() else size
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(size, min(world, int(here)) if here.isdigit() else world)


_runtimes: weakref.WeakSet[GroupRuntime] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """End the threads of groups that the program has not destroyed: one inside torch would abort the interpreter."""
    for runtime in list(_runtimes):
        runtime.close(drain_s=_EXIT_S)


def _disown_all() -> None:
    for runtime in list(_runtimes):
        runtime.disown()


os.register_at_fork(after_in_child=_disown_all)
