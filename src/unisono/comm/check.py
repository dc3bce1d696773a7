"""Check mode: before each collective the ranks compare what they are about to call, over the job's store.

So a rank that calls something else, somewhere else, or nothing, is an error on all ranks that says who called what
where, in place of a hang or a corrupted tensor. It costs a few messages to the store for each call. `UNISONO_CHECK=1`
asks for it, which `unisono run --check` sets.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.job import current_job
from unisono.comm.structure import compare, kind_of, signature, take_apart
from unisono.errors import PeerError, RankMismatchError

__all__ = [
    "CHECK_TIMEOUT_VARIABLE", "CHECK_VARIABLE", "Check", "describe", "difference", "kinds_of", "place_of", "user_frame",
    "wanted",
]  # fmt: skip

CHECK_VARIABLE = "UNISONO_CHECK"
"""Asks for check mode: 1."""
CHECK_TIMEOUT_VARIABLE = "UNISONO_CHECK_TIMEOUT"
"""Seconds that a rank waits for the others in check mode; the job's timeout if it is not set."""

_TIMEOUT_S = 1800.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0002, 0.02
_LOOK_EVERY_S = 0.25
"""Between looks at what the missing ranks are doing."""

Kinds = list[tuple[str, str]]
"""Places in a value and what is there, as `comm.structure.signature` gives them."""


def wanted() -> bool:
    """Say whether the environment asks for check mode. Raises: ValueError for a value that is no answer."""
    said = os.environ.get(CHECK_VARIABLE, "").lower()
    if said in ("", "0", "false", "no", "off"):
        return False
    if said in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"{CHECK_VARIABLE}={said!r} in the environment must be 1 or 0")


class Check:
    """The comparisons of one group, in the order of its calls.

    Args: store is the job's; name is the group's, the same on all ranks and used once; ranks are its members, and
        described says who they are, unless they are all.
    """

    def __init__(
        self,
        store: dist.Store,  # type: ignore[name-defined]
        name: str,
        *,
        own: int,
        ranks: Sequence[int],
        described: str,
    ) -> None:
        self._store, self._name, self._own, self._ranks = store, name, own, list(ranks)
        self._calls, self._pid = 0, os.getpid()
        self._timeout_s = _timeout_s()
        self._where = described and f" in the group of {described}"
        atexit.register(self._say_left)

    def compare(self, call: str, kinds: Kinds | None = None, *, described: str = "") -> None:
        """Compare a call with those of the other ranks. Every rank of the group must come here.

        Args: call is the operation with its arguments, kinds what its value is made of, where that must agree;
            described is what is said of a value that may differ.
        Raises: RankMismatchError, PeerError on all ranks.
        """
        number, self._calls = self._calls, self._calls + 1
        page = f"{self._name}/{number}"
        text = described or (", ".join(kind for _, kind in (kinds or [])[:4]) + ", ..." * (len(kinds or []) > 4))
        text = call + self._where + (text and " of ") + text
        entry = {"call": call, "kinds": kinds, "text": text, "where": caller()}
        self._store.set(f"at/{self._own}", json.dumps({"page": page, "ranks": self._ranks, **entry}))
        self._store.set(f"{page}/{self._own}", json.dumps(entry))
        self._wait(page)
        keys = [f"{page}/{rank}" for rank in self._ranks]
        entries = [json.loads(each) for each in self._read_all(keys)]
        if number:
            self._store.delete_key(f"{self._name}/{number - 1}/{self._own}")  # all have read it, to come here
        told = difference(entries, self._ranks)
        if told is not None:
            raise RankMismatchError(told)

    def _wait(self, page: str) -> None:
        """Wait until all ranks have written on a page. Raises: PeerError when it is known that they will not."""
        keys = [f"{page}/{rank}" for rank in self._ranks]
        end_s = time.monotonic() + self._timeout_s
        look_s, pause_s = time.monotonic() + _LOOK_EVERY_S, _SHORTEST_PAUSE_S
        while not self._store.check(keys):
            now_s = time.monotonic()
            if now_s >= min(look_s, end_s):
                look_s = now_s + _LOOK_EVERY_S
                self._look(page, late=now_s >= end_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        if self._store.check([f"{page}/given up"]):
            raise PeerError(self._read(f"{page}/given up"))

    def _look(self, page: str, *, late: bool) -> None:
        """Look at what the missing ranks do. Raises: PeerError if one cannot come, or if it is late."""
        if self._store.check([f"{page}/given up"]):
            raise PeerError(self._read(f"{page}/given up"))
        missing = [rank for rank in self._ranks if not self._store.check([f"{page}/{rank}"])]
        said: dict[int, dict[str, Any]] = {}
        for rank in missing:
            if self._store.check([f"at/{rank}"]):
                said[rank] = json.loads(self._read(f"at/{rank}"))
        left = [rank for rank in missing if self._store.check([f"left/{rank}"])]
        crossed = [rank for rank in missing if rank in said and self._waits_for_us(said[rank], page)]
        if not left and not crossed and not (late and missing):
            return
        why = (
            f"{_name(left)} ended before this call"
            if left
            else f"{_name(sorted([*crossed, self._own]))} wait for each other in different groups"
            if crossed
            else f"{_name(missing)} did not come within {self._timeout_s:g} s"
        )
        lines = []
        for rank in self._ranks:
            entry = said.get(rank) if rank in missing else json.loads(self._read(f"{page}/{rank}"))
            if entry is None:
                lines.append((rank, "has called nothing yet"))
            else:
                does = "waiting in" if rank not in missing or rank in crossed else "last called"
                lines.append((rank, f"{does} {entry['text']} at {entry['where']}"))
        text = f"{why}:{_table(lines)}\nMake all ranks of a group call the same, in the same order."
        # The first to see it speaks for all, also to those who come later.
        text = self._store.compare_set(f"{page}/given up", "", text).decode()
        raise PeerError(text)

    def _waits_for_us(self, said: dict[str, Any], page: str) -> bool:
        """Say whether a rank is in a call of another group that cannot end without this one."""
        return (
            said["page"] != page
            and self._own in said["ranks"]
            and not said["page"].startswith(f"{self._name}/")
            and not self._store.check([f"{said['page']}/{self._own}"])
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


def kinds_of(value: Any, place: str = "value") -> Kinds:
    """Give what a value is made of, as it must be on all ranks; what cannot be taken apart is named by its type."""
    if isinstance(value, Tensor):
        return [(place, describe(value))]
    try:
        return signature(take_apart(value, place=place).leaves)
    except TypeError:
        return [(place, _a(type(value).__qualname__))]


def describe(value: Any) -> str:
    """Write what a value is, without what is in it.

    >>> describe(torch.ones(2, requires_grad=True)), describe({"a": 1}), describe(None)
    ('float32 [2] that requires a gradient', 'a dict', 'None')
    """
    if isinstance(value, Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device.type}"
        follows = " that requires a gradient" if value.requires_grad and torch.is_grad_enabled() else ""
        return f"{kind_of(value)}{where}{follows}"
    return "None" if value is None else _a(type(value).__qualname__)


def caller() -> str:
    """Name the line outside of unisono and torch that is being executed, as file:line in function."""
    frame = user_frame()
    return place_of(frame.f_code, frame.f_lineno)


def user_frame(above: int = 0) -> FrameType:
    """Give the frame outside of unisono and torch that is being executed.

    Args: above is how many frames over the caller's are known to be none; each costs time.
    """
    frame = sys._getframe(above + 1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("unisono", "torch") and frame.f_back is not None:
        frame = frame.f_back
    return frame


def place_of(code: CodeType, line: int) -> str:
    """Write where code is, as file:line in function."""
    inside = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{Path(code.co_filename).name}:{line}{inside}"


def difference(entries: Sequence[dict[str, Any]], ranks: Sequence[int], *, absent: Sequence[int] = ()) -> str | None:
    """Say in what the calls of ranks differ; None if they do not. Args: absent are ranks of which nothing is known."""
    if len({entry["call"] for entry in entries}) > 1:
        why, remedy = "ranks call different things", "Make all ranks call the same, in the same order."
    else:
        kinds = [entry["kinds"] for entry in entries if entry["kinds"] is not None]
        who = [rank for rank, entry in zip(ranks, entries, strict=True) if entry["kinds"] is not None]
        found = compare([[tuple(pair) for pair in each] for each in kinds], who) if kinds else None
        if found is None:
            return None
        why, remedy = f"ranks disagree in {entries[0]['call']}: {found}", "Make the values alike on all ranks."
    lines = [(rank, f"{entry['text']} at {entry['where']}") for rank, entry in zip(ranks, entries, strict=True)]
    lines += [(rank, "has not come there") for rank in absent]
    return f"{why}:{_table(lines)}\n{remedy}"


def _table(lines: Sequence[tuple[int, str]]) -> str:
    """Write a line for each thing that ranks do, with the ranks that do it."""
    whose: dict[str, list[int]] = {}
    for rank, text in lines:
        whose.setdefault(text, []).append(rank)
    return "".join(f"\n  {_name(ranks)}: {text}" for text, ranks in whose.items())


def _name(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _a(noun: str) -> str:
    """Put the article before a noun."""
    return f"{'an' if noun[:1].lower() in 'aeiou' else 'a'} {noun}"


def _timeout_s() -> float:
    said = os.environ.get(CHECK_TIMEOUT_VARIABLE)
    if said:
        try:
            seconds = float(said)
        except ValueError:
            seconds = -1.0
        if not seconds > 0:
            raise ValueError(f"{CHECK_TIMEOUT_VARIABLE}={said!r} in the environment must be a number of seconds")
        return seconds
    job = current_job()
    return _TIMEOUT_S if job is None else job.timeout.total_seconds()
