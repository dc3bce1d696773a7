"""Frees a rank from a process group whose operations would wait for a dead rank for ever.

Operations of gloo and shm fail when a peer is gone. Those of NCCL run on the GPU: the rank waits in a synchronization
with it, in C++, for a kernel that never ends. So a thread looks for a decision of the launcher that this rank has not
followed, and then aborts the group, which ends its kernels. The synchronization returns, without an error and with any
values: nobody may use what has come over such a group before `GroupWatch.confirm`.

An aborted kernel also tells its peers that it has sent what it has not. So a rank's sum may be wrong before that rank
has aborted anything itself, and none may abort before all can know: the launcher writes a decision into the pages of
all ranks first, and then tells all of them that it has. Start reading at `next_action`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist

from unisono import recovery_link
from unisono.errors import PeerError
from unisono.recovery_link import RecoveryLink
from unisono.variables import HOST_VARIABLE

__all__ = [
    "BETWEEN_CALLS",
    "GroupWatch",
    "abort_is_survived",
    "declare_unending",
    "next_action",
    "start_watch",
    "waits_for_the_dead",
]

_unending = {"nccl"}
"""Backends whose operations wait for a dead rank for ever; see `declare_unending`."""

_PAUSE_S = 0.05
_SHORT_PAUSE_S = 0.0005
_LOOK_S = 1.0
"""How often the group is asked whether it has failed."""
_ABORT_S = 60.0
"""How long an abort may take: it waits for the GPU, and has been known not to end."""
_PATIENCE_S = 5.0
"""How long a group may report an error before the process ends: the launcher may be about to replace a rank."""

BETWEEN_CALLS = "ranks call collectives of torch.distributed or unisono.comm between the Trainer's calls"
"""Why no rank of a job can be replaced alone."""

_SETTINGS = {
    # 1 and 3 end the process when its group is aborted, and 2 aborts the group without a word to anyone.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # A rank would tell of its error in the job's store, and end all processes that read it there, new ranks, too.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error, torch's thread sleeps four times as long, and the thread that drops the group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "50",
}
"""The environment variables that torch reads when it makes a group of NCCL."""


def declare_unending(backend: str) -> None:
    """Declare that operations of a backend wait for a dead rank for ever, as those of NCCL do.

    Call it before a group of this backend is made.
    """
    _unending.add(backend)


def waits_for_the_dead(backends: str) -> bool:
    """Return True if operations of a group would wait for a dead rank for ever.

    Args:
        backends: The name of its backend, or a name for each type of device.

    >>> waits_for_the_dead("nccl"), waits_for_the_dead("cpu:gloo,cuda:nccl"), waits_for_the_dead("cpu:gloo,cuda:gloo")
    (True, True, False)
    >>> waits_for_the_dead("cpu:shm,cuda:nccl")  # torch then makes a group of shm alone
    False
    """
    names = {pair.rpartition(":")[2] for pair in backends.split(",")}
    return not names.isdisjoint(_unending) and "shm" not in names


def next_action(*, joined: int, settled: int, failed_s: float | None) -> Literal["wait", "abort", "end"]:
    """Return what to do about a group.

    Args:
        joined: The number of the decision after which the group was made.
        settled: The number of the latest decision that all ranks can know.
        failed_s: How long ago the group reported an error, as after its timeout; None: it has reported none.

    Returns:
        "abort" to free this rank, which then meets the others; "end" to end this process, as torch does by default.

    >>> next_action(joined=2, settled=2, failed_s=None)
    'wait'
    >>> next_action(joined=2, settled=3, failed_s=None)
    'abort'
    >>> next_action(joined=2, settled=2, failed_s=1.0)  # a rank may have died: the launcher decides soon
    'wait'
    >>> next_action(joined=2, settled=2, failed_s=6.0)
    'end'
    """
    if settled > joined:
        return "abort"
    return "end" if failed_s is not None and failed_s > _PATIENCE_S else "wait"


def _has_hosts() -> bool:
    """Return True if there may be several hosts, whose launchers do not tell all ranks before one acts."""
    return HOST_VARIABLE in os.environ


def _is_unending(group: dist.ProcessGroup) -> bool:
    return waits_for_the_dead(str(dist.get_backend_config(group)))


@contextmanager
def abort_is_survived(backends: str) -> Iterator[None]:
    """Let torch leave it to a `GroupWatch` what becomes of groups that are made meanwhile, if one will watch them."""
    if recovery_link.current is None or _has_hosts() or not waits_for_the_dead(backends):
        yield
        return
    before = {name: os.environ.get(name) for name in _SETTINGS}
    os.environ.update(_SETTINGS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def start_watch(device: torch.device, *, number: int) -> GroupWatch | None:
    """Watch the default group, if its operations would wait for a dead rank, and the launcher replaces ranks.

    Args:
        device: The device on which this rank computes.
        number: The number of the decision after which the group was made.
    """
    link, group = recovery_link.current, dist.group.WORLD
    if link is None or group is None or _has_hosts() or not _is_unending(group):
        return None
    return GroupWatch(group, device, link=link, number=number)


class GroupWatch:
    """A thread that aborts the default group once the launcher has made another decision than that of the group.

    Args:
        group: The group, made under `abort_is_survived`.
        device: The device on which this rank computes.
        link: The link to the launcher.
        number: The number of the decision after which the group was made.
    """

    def __init__(self, group: Any, device: torch.device, *, link: RecoveryLink, number: int) -> None:
        self._group, self._device, self._link, self._number = group, device, link, number
        self._look_s = 0.0
        self._failed_s: float | None = None
        self._ended = threading.Event()
        self._aborted = False
        self.is_guarded: Callable[[], bool] = lambda: False
        """Returns True if nothing that comes over the group is used before `confirm`, as the script might do.

        Otherwise this process ends where it would abort the group, and no rank is replaced alone.
        """
        self._thread = threading.Thread(target=self._run, name="unisono group watch", daemon=True)
        self._thread.start()

    @property
    def is_cut_off(self) -> bool:
        """True if any rank of the group may have aborted it: what comes over it from then on has no meaning."""
        return self._link.membership().number > self._number

    def confirm(self) -> None:
        """Wait for the operations of the group that have been started, and check that no rank has aborted them.

        Raises:
            PeerError: A rank may have: what has come over the group may be anything.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        if self.is_cut_off:  # on all ranks before any rank aborts, so what has ended before this line has ended well
            raise PeerError("the process group was aborted, since the launcher replaces a rank of this job")

    def stop(self, *, aborts: bool = False) -> None:
        """End the thread.

        Args:
            aborts: True to abort the group, if the thread has not done so. There must be a newer decision.
        """
        self._ended.set()
        self._thread.join()
        if aborts and not self._aborted:
            self._abort()
        self._group = None

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE_S) and self._is_current():
            action = next_action(
                joined=self._number, settled=self._link.settled(), failed_s=self._seconds_since_failure()
            )
            if action == "end":
                self._end(f"has failed ({self._error()}), and no other rank has died")
            if action == "abort":
                self._end_unless_guarded()
                self._abort()
                self._end_unless_guarded()  # the script may have begun an operation just before the abort
                return

    def _end_unless_guarded(self) -> None:
        if not self.is_guarded():
            self._link.refuse(BETWEEN_CALLS)
            self._end("was aborted in a collective of the script, whose result would be wrong: another rank has died")

    def _is_current(self) -> bool:
        """Return False if the script has ended the group."""
        return dist.group.WORLD is self._group

    def _abort(self) -> None:
        """Abort the group; end this process if that does not succeed, so that it is replaced as well."""
        self._aborted = True
        while self._link.settled() <= self._number:
            time.sleep(_SHORT_PAUSE_S)
        done = threading.Event()
        # Subgroups, too: to end them would wait for a dead rank as well.
        groups = [each for each in tuple(dist.distributed_c10d._world.pg_map) if _is_unending(each)]

        def abort() -> None:
            for group in groups:
                group.abort()  # not torch's _abort_process_group, which changes what the main thread reads meanwhile
            groups.clear()
            done.set()

        threading.Thread(target=abort, name="unisono group abort", daemon=True).start()
        if not done.wait(_ABORT_S):
            self._end(f"could not be aborted within {_ABORT_S:g} s after another rank had died")

    def _seconds_since_failure(self) -> float | None:
        now_s = time.monotonic()
        if self._failed_s is None and now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            if self._error() != "SUCCESS":
                self._failed_s = now_s
        return None if self._failed_s is None else now_s - self._failed_s

    def _error(self) -> str:
        backend = self._group._get_backend(self._device)
        error = getattr(backend, "wrapped_pg", backend).get_error()  # wrapped by TORCH_DISTRIBUTED_DEBUG=DETAIL
        return str(error.name)

    def _end(self, what: str) -> None:
        """End this process as torch would have: values of an operation that has failed must not be used."""
        print(f"unisono: rank {self._group.rank()} ends, since its process group {what}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
