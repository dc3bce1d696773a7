"""Frees a rank from operations of gloo that would wait for a lost rank for ever.

A rank that dies closes its connections, and most operations of gloo fail on the others at once. Two cases are left. A
host without power or link closes nothing. And a message that is partly sent or received when its connection breaks
never ends (see `message_abort`): of a large gradient, most deaths leave some. So a thread looks for a decision of the
launcher that this rank has not followed, breaks the connections of the group, and frees the threads that wait. Start
reading at `ConnectionWatch`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from unisono import recovery_link
from unisono.errors import PeerError
from unisono.job.default_group import Sockets, close_connections
from unisono.job.message_abort import abort_message
from unisono.recovery_link import RecoveryLink

__all__ = ["ConnectionWatch", "keep_for_ever", "watch_connections"]

_PAUSE_S = 0.05
_SLICE = timedelta(seconds=0.1)
_PATIENCE_S = 5.0
"""How long a thread may go on waiting that cannot be freed."""


def watch_connections(connections: Sockets, *, number: int) -> ConnectionWatch | None:
    """Watch over the connections of a group, if there is a launcher that may replace ranks.

    Args:
        connections: The connections of the group; none if its backend has no sockets.
        number: The number of the decision after which the group was made.
    """
    link = recovery_link.current
    return None if link is None or not connections else ConnectionWatch(connections, link=link, number=number)


class ConnectionWatch:
    """A thread that breaks the connections of a group once the launcher has made a newer decision than its own.

    It also does so when the launcher ends all ranks because one has failed, or a host is lost: a rank that waits for
    one that is lost would not act on SIGTERM before it is killed, and so not save its state.

    Args:
        connections: The connections of the group.
        link: The link to the launcher.
        number: The number of the decision after which the group was made.
    """

    is_cut_off = False
    """Operations over broken connections fail, so what has come over the group is right."""

    def __init__(self, connections: Sockets, *, link: RecoveryLink, number: int) -> None:
        self._connections, self._link, self._number = connections, link, number
        self.is_guarded: Callable[[], bool] = lambda: False
        """Not used: operations over broken connections fail, also those of the script."""
        self.is_broken = False
        """True once the connections are broken: no operation that has not ended will end well."""
        self._messages: list[dist.Work] = []
        """Those that threads wait for."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono connection watch", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Do nothing: see `is_cut_off`."""

    def check(self) -> None:
        """Raise PeerError if the connections were broken."""
        if self.is_broken:
            raise PeerError(
                "the connections of the process group were broken, since the launcher replaces or ends ranks"
            )

    def wait_for_message(self, work: dist.Work) -> None:
        """Wait for a send or a receive of gloo.

        Raises:
            PeerError: The connections were broken.
            RuntimeError: The message failed, as in `Work.wait`.
        """
        self._messages.append(work)
        try:
            self.check()
            if not work.wait():  # because of `abort_message`
                self.check()
        finally:
            self._messages.remove(work)

    def wait_for_collective(self, work: dist.Work) -> None:
        """Wait for a collective of gloo, which its own thread performs.

        Raises:
            PeerError: The connections were broken.
            RuntimeError: The collective failed, as in `Work.wait`.
        """
        while True:
            try:
                work.wait(_SLICE)
            except RuntimeError:  # late or failed; later errors must not have this one as their context
                pass
            else:
                return
            if work.is_completed():
                work.wait()
                return
            if self.is_broken:
                for group in tuple(dist.distributed_c10d._world.pg_map):
                    keep_for_ever(group)
                self.check()

    def stop(self, *, aborts: bool = False) -> None:
        """End the thread. `leave_group` breaks the connections itself."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        begun_s = 0.0
        while not self._ended.wait(_PAUSE_S):
            if not self.is_broken:
                if self._link.membership().number <= self._number and not self._link.job_failed():
                    continue
                self.is_broken, begun_s = True, time.monotonic()
                close_connections(self._connections)
            # Not [*map(...)]: the first that cannot be freed is enough.
            if not all(map(abort_message, tuple(self._messages))) and time.monotonic() > begun_s + _PATIENCE_S:
                self._end()

    def _end(self) -> None:
        """End this process, which cannot go on; then it is replaced as well."""
        print(
            "unisono: this rank ends: it waits for a message that can never end, since another rank was lost",
            file=sys.stderr,
            flush=True,
        )
        os.kill(os.getpid(), signal.SIGABRT)


def keep_for_ever(group: dist.ProcessGroup) -> None:
    """Prevent the destruction of a group, which would wait for an operation that cannot end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
