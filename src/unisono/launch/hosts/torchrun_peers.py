"""Hosts of a job that torchrun's launchers have started: they take part in the rendezvous, and in no log.

Start reading at `watch_peers` and `await_all`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from unisono.launch.hosts.host_settings import HostSettings
from unisono.launch.hosts.meeting import Meeting
from unisono.launch.hosts.term import STORE_ERRORS

__all__ = ["await_all", "has_torchrun", "watch_peers"]

_BARRIER = "torchelastic/agent/terminal_state"
"""The barrier at which torchrun's agents wait for each other at the end."""

_PAUSE_S = 0.3


def has_torchrun(meeting: Meeting) -> bool:
    """Return True if some of the hosts have said nothing of themselves, as those of unisono do."""
    return len(meeting.hellos) < meeting.place.hosts


def watch_peers(
    meeting: Meeting, settings: HostSettings, *, is_over: Callable[[], bool], found: Callable[[str], None]
) -> None:
    """Look what hosts of torchrun do, until the job is over; call `found` with why it cannot go on with them."""
    while not is_over():
        time.sleep(_PAUSE_S)
        if not is_over() and (problem := _find_problem(meeting, settings)):
            found(problem)
            return


def _find_problem(meeting: Meeting, settings: HostSettings) -> str:
    """Return why the job cannot go on with these hosts; "" if it can. To be called again and again."""
    if meeting.handler is None:
        return ""
    try:
        if meeting.handler.is_closed():
            return "a host started by torchrun has ended the job"
        if meeting.handler.num_nodes_waiting() > 0:
            return "a host wants to join, or torchrun starts its ranks anew; unisono does not follow yet"
    except STORE_ERRORS:
        return (
            f"the host of the rendezvous, {settings.endpoint}, has closed its connection: its launcher has ended, or "
            "was killed"
        )
    return ""


def await_all(meeting: Meeting, *, came: Callable[[], None]) -> None:
    """Wait in a thread at torchrun's barrier until the ranks of all hosts have succeeded, and call `came` then.

    Not by polling: where torchrun serves the store, the store ends right after all have come.
    """

    def wait() -> None:
        have_come = False
        with suppress(*STORE_ERRORS):
            # The hosts of unisono have all come here, and each counts for itself.
            if meeting.store.add(f"{_BARRIER}/num_members", 1) == meeting.place.hosts:
                meeting.store.set(f"{_BARRIER}/last_member", "<val_ignored>")
            have_come = True
            meeting.store.wait([f"{_BARRIER}/last_member"], timedelta(days=365))
        if have_come:
            came()

    threading.Thread(target=wait, daemon=True).start()
