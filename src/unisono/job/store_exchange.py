"""Exchanges of values over a store, and waits for its keys: for ranks that have no process group yet, or no longer.

Each rank writes one value to the store and reads those of all ranks; ranks that do not come, or that fail, become
errors instead of a hang. Start reading at `StoreExchange.exchange`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from unisono.errors import PeerError
from unisono.text import name_ranks

__all__ = ["StoreExchange", "late_message", "wait_for_keys"]

_GRACE_S = 3.0
"""Seconds that the other ranks wait longer than rank 0: ranks do not begin to wait at the same moment."""


class StoreExchange:
    """An exchange over a store: every rank writes a value and reads those of all ranks.

    Each name must be used only once per store, and all ranks must use names in the same order.
    """

    def __init__(
        self,
        store: dist.Store,  # type: ignore[name-defined]
        name: str,
        *,
        rank: int,
        size: int,
        timeout_s: float,
    ) -> None:
        self._store = dist.PrefixStore(f"unisono/{name}", store)  # type: ignore[attr-defined]
        self._rank, self._size, self._timeout_s = rank, size, timeout_s

    def exchange(self, value: Any, *, doing: str) -> list[Any]:
        """Return one JSON value of every rank, in rank order. Every rank must call it.

        Rank 0 collects the values, so each rank has two round trips to the store, and rank 0 some more.

        Args:
            value: The value of this rank. An exception, for a rank that cannot go on, is raised here after the other
                ranks have received it.
            doing: Completes "rank 1 did not ..." and "rank 1 could not ..." in errors.

        Raises:
            PeerError: Another rank passed an exception or a value that is not JSON, or some ranks do not call in time.
            TypeError, ValueError, RecursionError: The value is not JSON; the other ranks raise PeerError.
        """
        text = ""
        if self._size > 1 and not isinstance(value, Exception):
            try:
                text = json.dumps({"value": value})
            except (TypeError, ValueError, RecursionError) as error:
                value = error
        if self._size > 1:
            if isinstance(value, Exception):
                text = json.dumps({"error": f"{type(value).__name__}: {value}"})
            everyone = self._collect(text, doing)
        if isinstance(value, Exception):
            raise value
        if self._size == 1:
            return [value]
        for rank, theirs in enumerate(everyone):
            if "error" in theirs:
                raise PeerError(f"rank {rank} could not {doing}: {theirs['error']}")
        return [theirs["value"] for theirs in everyone]

    def _collect(self, mine: str, doing: str) -> list[dict[str, Any]]:
        store, deadline_s = self._store, time.monotonic() + self._timeout_s
        store.set(f"rank/{self._rank}", mine)
        if self._rank == 0:
            keys = [f"rank/{rank}" for rank in range(self._size)]
            if not wait_for_keys(store, keys, deadline_s):
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
                said = f"{name_ranks(missing)} did not {doing} within {self._timeout_s:g} s"
                store.set("all", json.dumps(said))
                raise PeerError(late_message(said))
            everyone = [json.loads(text) for text in store.multi_get(keys)]
            store.set("all", json.dumps(everyone))
            return everyone
        # Somewhat longer than rank 0, which lists the missing ranks when its time is over.
        if not wait_for_keys(store, ["all"], deadline_s + _GRACE_S):
            raise PeerError(late_message(f"rank 0 did not {doing} within {self._timeout_s:g} s"))
        answer = json.loads(store.get("all"))
        if isinstance(answer, str):
            raise PeerError(late_message(answer))
        return list(answer)


def late_message(said: str) -> str:
    """Return the message of an error about ranks that have not come in time."""
    return (
        f"{said}. Every rank must come there, and all must agree how many there are: see what the others printed. "
        "Under `unisono run`, `unisono stacks` shows where they are."
    )


def wait_for_keys(
    store: dist.Store,  # type: ignore[name-defined]
    keys: list[str],
    deadline_s: float,
    *,
    check: Callable[[], None] = lambda: None,
) -> bool:
    """Wait for keys of a store, interruptible by Ctrl-C; return True if all are there before the deadline.

    It polls, with pauses of a tenth of the time waited and at most 0.1 s: torch's own wait cannot be interrupted, and
    writes warnings when it ends without success.

    Args:
        store: The store.
        keys: What to wait for.
        deadline_s: By the monotonic clock.
        check: Called while this rank waits; may raise.
    """
    started_s = time.monotonic()
    while not store.check(keys):
        check()
        now_s = time.monotonic()
        if now_s >= deadline_s:
            return False
        time.sleep(min(0.1, max(0.0002, 0.1 * (now_s - started_s)), max(0.0, deadline_s - now_s)))
    return True
