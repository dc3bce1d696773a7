"""Signs that the launcher of another host has ended, other than its silence. Start reading at `watch_end`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from unisono.launch.hosts.guarded_port import refuses
from unisono.launch.hosts.own_store import connect, way_to
from unisono.launch.hosts.term import STORE_ERRORS
from unisono.tcp_store import LOOPBACK

__all__ = ["has_ended", "watch_end"]

_GOODBYE_S = 0.1
"""How long to wait for the last words of a host that has closed its connection."""


def watch_end(hello: Mapping[str, Any], token: str, *, has_left: Callable[[], bool], ended: Callable[[], None]) -> None:
    """Wait in a thread at the store of a host, which closes the connection if all of its launcher is killed.

    Args:
        hello: What the host has said of itself.
        has_left: Returns True if it has said that it leaves, or runs still.
        ended: Called if it has not, and has closed its connection.
    """

    def wait() -> None:
        way = way_to(hello, token)
        with suppress(*STORE_ERRORS):
            connect((LOOPBACK, way.port), "never").wait(["never"], timedelta(days=365))
        is_known = True
        if way.has_ended:
            with suppress(*STORE_ERRORS):
                is_known = has_left()
        if not is_known:
            ended()
        way.close()

    threading.Thread(target=wait, name="unisono-host-end", daemon=True).start()


def has_ended(hello: Mapping[str, Any]) -> bool:
    """Return True if a host that has closed a connection refuses others, a moment later: it may say why before."""
    time.sleep(_GOODBYE_S)
    return refuses((hello["address"], hello["store"]), timeout_s=1.0)
