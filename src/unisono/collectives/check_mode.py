"""Check mode: before each collective the ranks compare what they are about to call, over the job's store.

If a rank makes another call, in another group or not at all, all ranks raise an error with each rank's call and its
place in the program, instead of a hang or a corrupted tensor. It costs a few messages to the store for each call.
`UNISONO_CHECK=1` enables it, which `unisono run --check` sets.
"""

from __future__ import annotations

import atexit
import json
import os
import time
from contextlib import suppress
from typing import Any

from unisono.collectives.call_description import ComparisonPlace, Kinds, difference, place_of, user_frame
from unisono.errors import PeerError, RankMismatchError
from unisono.job.current import current_job
from unisono.mismatch import REMEDY, list_ranks
from unisono.polling import pauses
from unisono.text import name_ranks
from unisono.variables import CHECK_VARIABLE

__all__ = ["CHECK_TIMEOUT_VARIABLE", "CallChecker", "wanted"]

CHECK_TIMEOUT_VARIABLE = "UNISONO_CHECK_TIMEOUT"
"""The variable with the seconds that a rank waits for the others in check mode; without it, the job's timeout."""

_TIMEOUT_S = 1800.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_LOOK_EVERY_S = 0.25
"""Seconds between looks at what the missing ranks are doing."""


def wanted() -> bool:
    """Return True if the environment enables check mode.

    Raises:
        ValueError: The variable is neither true nor false.
    """
    found = os.environ.get(CHECK_VARIABLE, "").lower()
    if found in ("", "0", "false", "no", "off"):
        return False
    if found in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"{CHECK_VARIABLE}={found!r} in the environment must be 1 or 0")


class CallChecker:
    """Compares the calls of one group, in their order, over the job's store.

    Args:
        place: The ranks and their store.
    """

    def __init__(self, place: ComparisonPlace) -> None:
        self._store, self._name, self._own, self._ranks, self._where = place
        self._calls, self._pid = 0, os.getpid()
        self._timeout_s = _timeout_s()
        atexit.register(self._say_left)

    def compare(self, call: str, kinds: Kinds | None = None, *, described: str = "") -> None:
        """Compare a call with those of the other ranks. Every rank of the group must call it.

        Args:
            call: The operation with its arguments.
            kinds: The structure of its value, where ranks must agree in it.
            described: A description of a value that may differ between ranks.

        Raises:
            RankMismatchError: The calls differ; raised on all ranks.
            PeerError: A rank does not make this call; raised on every rank that does.
        """
        number, self._calls = self._calls, self._calls + 1
        page = f"{self._name}/{number}"
        text = described or (", ".join(kind for _, kind in (kinds or [])[:4]) + ", ..." * (len(kinds or []) > 4))
        text = call + self._where + (text and " of ") + text
        frame = user_frame()
        entry = {"call": call, "kinds": kinds, "text": text, "where": place_of(frame.f_code, frame.f_lasti)}
        self._store.set(f"at/{self._own}", json.dumps({"page": page, "ranks": self._ranks, **entry}))
        self._store.set(f"{page}/{self._own}", json.dumps(entry))
        self._wait(page)
        keys = [f"{page}/{rank}" for rank in self._ranks]
        entries = [json.loads(each) for each in self._read_all(keys)]
        if number:
            self._store.delete_key(f"{self._name}/{number - 1}/{self._own}")  # every rank in this call has read it
        told = difference(entries, self._ranks)
        if told is not None:
            raise RankMismatchError(told)

    def _wait(self, page: str) -> None:
        """Wait until all ranks have written to a page.

        Raises:
            PeerError: A rank cannot do so any more, or is late.
        """
        keys = [f"{page}/{rank}" for rank in self._ranks]
        end_s = time.monotonic() + self._timeout_s
        look_s, pauses_s = time.monotonic() + _LOOK_EVERY_S, pauses(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        while not self._store.check(keys):
            now_s = time.monotonic()
            if now_s >= min(look_s, end_s):
                look_s = now_s + _LOOK_EVERY_S
                self._look(page, late=now_s >= end_s)
            time.sleep(next(pauses_s))
        if self._store.check([f"{page}/given up"]):
            raise PeerError(self._read(f"{page}/given up"))

    def _look(self, page: str, *, late: bool) -> None:
        """Check whether the missing ranks can still make the call.

        Raises:
            PeerError: One cannot, or is late.
        """
        if self._store.check([f"{page}/given up"]):
            raise PeerError(self._read(f"{page}/given up"))
        missing = [rank for rank in self._ranks if not self._store.check([f"{page}/{rank}"])]
        found: dict[int, dict[str, Any]] = {}
        for rank in missing:
            if self._store.check([f"at/{rank}"]):
                found[rank] = json.loads(self._read(f"at/{rank}"))
        left = [rank for rank in missing if self._store.check([f"left/{rank}"])]
        crossed = [rank for rank in missing if rank in found and self._waits_for_us(found[rank], page)]
        if not left and not crossed and not (late and missing):
            return
        why = (
            f"{name_ranks(left)} ended before this call"
            if left
            else f"{name_ranks([*crossed, self._own])} wait for each other in different groups"
            if crossed
            else f"{name_ranks(missing)} did not come within {self._timeout_s:g} s"
        )
        lines = []
        for rank in self._ranks:
            entry = found.get(rank) if rank in missing else json.loads(self._read(f"{page}/{rank}"))
            if entry is None:
                lines.append((rank, "has called nothing yet"))
            else:
                does = "waiting in" if rank not in missing or rank in crossed else "last called"
                lines.append((rank, f"{does} {entry['text']} at {entry['where']}"))
        text = f"{why}:{list_ranks(lines)}\n{REMEDY}"
        # The first rank to see it writes the message for all, also for those that arrive later.
        text = self._store.compare_set(f"{page}/given up", "", text).decode()
        raise PeerError(text)

    def _waits_for_us(self, found: dict[str, Any], page: str) -> bool:
        """Return True if a rank is in a call of another group that cannot end without this rank."""
        return (
            found["page"] != page
            and self._own in found["ranks"]
            and not found["page"].startswith(f"{self._name}/")
            and not self._store.check([f"{found['page']}/{self._own}"])
        )

    def _read_all(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]

    def _read(self, key: str) -> str:
        return str(self._store.get(key).decode())

    def _say_left(self) -> None:
        if os.getpid() == self._pid:
            with suppress(RuntimeError):  # the store may have ended before
                self._store.set(f"left/{self._own}", "")


def _timeout_s() -> float:
    found = os.environ.get(CHECK_TIMEOUT_VARIABLE)
    if found:
        try:
            seconds = float(found)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise ValueError(f"{CHECK_TIMEOUT_VARIABLE}={found!r} in the environment must be a number of seconds")
        return seconds
    job = current_job()
    return _TIMEOUT_S if job is None else job.timeout.total_seconds()
