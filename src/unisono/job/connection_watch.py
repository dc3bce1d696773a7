"""Frees a rank from a process group of which another host does not answer any more.

A rank that dies closes its connections, and operations of gloo fail on the others at once. A host without power or link
closes nothing: the others would wait for it until the timeout of the group. So, where there may be several hosts, a
thread looks for a decision of the launcher that this rank has not followed, and then breaks the connections of the
group. Start reading at `ConnectionWatch`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from unisono import recovery_link
from unisono.job.default_group import Sockets, close_connections
from unisono.recovery_link import RecoveryLink
from unisono.variables import HOST_VARIABLE

__all__ = ["ConnectionWatch", "watch_connections"]

_PAUSE_S = 0.05


def watch_connections(connections: Sockets, *, number: int) -> ConnectionWatch | None:
    """Watch over the connections of a group, if there may be several hosts, and the launcher replaces ranks.

    Args:
        connections: The connections of the group.
        number: The number of the decision after which the group was made.
    """
    link = recovery_link.current
    if link is None or not connections or HOST_VARIABLE not in os.environ:
        return None
    return ConnectionWatch(connections, link=link, number=number)


class ConnectionWatch:
    """A thread that breaks the connections of a group once the launcher has made a newer decision than its own.

    It also does so when the launcher ends all ranks because one has failed, or a host is lost: a rank that waits for a
    host that is silent would not act on SIGTERM before it is killed, and so not save its state.

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
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unisono connection watch", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Do nothing: see `is_cut_off`."""

    def stop(self, *, aborts: bool = False) -> None:
        """End the thread. `leave_group` breaks the connections itself."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_PAUSE_S):
            if self._link.membership().number > self._number or self._link.job_failed():
                close_connections(self._connections)
                return
