"""A late look at what ranks call: collectives that have not ended after a second are compared, over the job's store.

Ranks that call different things would wait for each other for ever in gloo. A call that ends in time costs no more than
a note of what it was. Check mode, which compares every call before it begins, is `collectives.check_mode`'s. Start
reading at `CallWatchdog.run`.
"""

from __future__ import annotations

import ctypes
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.collectives.call_description import Members, difference, place_of, user_frame
from unisono.collectives.reduce_ops import name_of
from unisono.errors import RankMismatchError

__all__ = ["CallTemplate", "CallWatchdog"]

_PATIENCE = timedelta(seconds=1)
"""How long a call runs before it is looked at."""
_PAUSE = timedelta(seconds=0.5)
"""Between looks for what the others have found."""
_KEPT = 32
"""Calls that are remembered. A root of small broadcasts may be far ahead of ranks that wait in another call."""
_NEIGHBOURS = 16
"""Ranks on either side that each compares with. If not all in a ring are equal, two neighbours differ."""
_FOR_OTHERS_S = 1.5
"""How long a rank that raises waits for the others: for those that come just now, and until all have read why."""

_PLACE_IN_CPP = re.compile(r"^\[(?:enforce fail at )?[^\]\s]+:\d+\] ")

CallTemplate = tuple[str, object]
"""The operation as users know it, and what stands at the {!r} in it; None: nothing does."""


_Told = dict[int, dict[str, dict[str, Any]]]
"""By rank the latest calls up to the one that it waits in, by number."""


_Note = tuple[CallTemplate, str | tuple[torch.dtype, torch.Size], CodeType, int]
"""One call of this rank, with nothing that keeps its value alive: the call, a description of the value or a tensor's
type and shape, and where the user's code is. A plain tuple, for one is made at every call."""


class CallWatchdog:
    """The calls of one group, and their comparison when one is late. Args: store is the job's."""

    def __init__(self, store: dist.Store, members: Members) -> None:  # type: ignore[name-defined]
        self._store, self._members = store, members
        self._name, self._own, self._ranks = members.group, members.own, list(members.ranks)
        self._lock = threading.RLock()  # calls are counted in the order in which the backend gets them
        self._notes: deque[_Note] = deque(maxlen=_KEPT)
        self._count = 0
        self._broken: str | None = None

    def run(
        self,
        call: CallTemplate,
        value: Tensor | str,
        operation: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        """Run an operation of torch.distributed to its end. Called by `Link.run` alone.

        Args: call says what it is, value what it is called with: a tensor alike on all ranks, or a description of what
            may differ. args and kwargs are the operation's, with the group.
        Raises: RankMismatchError if ranks call different things; the backend's error.
        """
        if self._broken is not None:
            raise RankMismatchError(self._broken)
        with self._lock:
            work: dist.Work = operation(*args, async_op=True, **kwargs)
            # Gloo's thread works meanwhile.
            frame = user_frame(above=2)  # Link.run, and who calls that
            told = value if isinstance(value, str) else (value.dtype, value.shape)
            note = (call, told, frame.f_code, frame.f_lasti)
            self._notes.append(note)
            self._count += 1
        try:
            work.wait(_PATIENCE)
        except RuntimeError:  # late, or failed; what follows is not to be told as this error's consequence
            pass
        else:
            return
        try:
            self._wait(work, note)
        finally:
            if not work.is_completed():
                _keep_for_ever(kwargs["group"])

    def _wait(self, work: dist.Work, note: _Note) -> None:
        """Wait for a call that is late or has failed."""
        looks, published = True, False
        while not work.is_completed():
            if looks:
                looks = self._look(first=not published)
                published = True
            with suppress(RuntimeError):  # if it has failed, that is raised below
                work.wait(_PAUSE)
        if looks and published:
            with suppress(RuntimeError):
                self._store.set(self._key(self._own), "{}")  # not deleted: others may be about to get it
        try:
            work.wait()
        except RuntimeError as error:
            if published:  # the others may have ended because of what they have found
                with suppress(RuntimeError):
                    if self._store.check([f"{self._name}/told"]):
                        raise RankMismatchError(self._read("told")) from error
            raise RuntimeError(self._explain(note, error)) from error

    def _explain(self, note: _Note, error: RuntimeError) -> str:
        entry = self._entry(note)
        said = _PLACE_IN_CPP.sub("", str(error)).partition(". This is typically")[0].rstrip(". \n")
        return (
            f"{entry['text']} at {entry['where']} failed on rank {self._own}: {said}.\n"
            "If another rank ended, see what it printed. gloo ends one that gets more data than it expects: `unisono "
            "run --check`, or UNISONO_CHECK=1, says which rank called this with another tensor."
        )

    def _look(self, *, first: bool) -> bool:
        """Tell the others what this rank waits for, and see what they have told.

        Returns: whether to look again; not when the store has ended. Raises: RankMismatchError.
        """
        try:
            if first:
                self._publish()
            if not self._store.check([f"{self._name}/told"]):
                told = self._told(self._neighbours()) if first else {}
                if _difference(told) is None:
                    return True
                self._settle(told)
            text = self._read("told")
            self._store.set(f"{self._name}/read/{self._own}", "")
            keys = [f"{self._name}/read/{rank}" for rank in self._told(self._ranks)]
            end_s = time.monotonic() + _FOR_OTHERS_S
            while not self._store.check(keys) and time.monotonic() < end_s:
                time.sleep(0.02)
        except RuntimeError:
            return False
        self._broken = text
        raise RankMismatchError(text)

    def _publish(self) -> None:
        with self._lock:
            notes, count = list(self._notes), self._count
        calls = {str(count - len(notes) + index): self._entry(note) for index, note in enumerate(notes)}
        self._store.set(self._key(self._own), json.dumps(calls))

    def _neighbours(self) -> list[int]:
        place = self._ranks.index(self._own)
        ring = (self._ranks[place:] + self._ranks[:place]) * 2
        return sorted(set(ring[max(0, len(self._ranks) - _NEIGHBOURS) :][: 2 * _NEIGHBOURS + 1]))

    def _told(self, ranks: Sequence[int]) -> _Told:
        """Read what those of the ranks have told that wait."""
        there = [rank for rank in ranks if self._store.check([self._key(rank)])]
        found = {rank: json.loads(self._store.get(self._key(rank))) for rank in there}
        return {rank: calls for rank, calls in found.items() if calls}

    def _settle(self, told: _Told) -> None:
        """Say for all ranks in what they differ, unless another one does so. Args: told is of ranks that differ."""
        end_s = time.monotonic() + _FOR_OTHERS_S
        while len(told) < len(self._ranks) and time.monotonic() < end_s:
            time.sleep(0.02)
            told = {**told, **self._told([rank for rank in self._ranks if rank not in told])}
        number = _difference(told)
        assert number is not None
        entries = {rank: told[rank][number] for rank in self._ranks if number in told.get(rank, {})}
        absent = [rank for rank in self._ranks if rank not in entries]
        text = difference(list(entries.values()), list(entries), absent=absent)
        self._store.compare_set(f"{self._name}/told", "", text or "ranks call different things")

    def _entry(self, note: _Note) -> dict[str, Any]:
        """Write a call down for others. Calls that are alike end together."""
        (template, argument), value, code, instruction = note
        call = template if argument is None else template.format(argument)
        if isinstance(value, str):
            kind, alike = value, [call, "", 0]
        else:
            dtype, shape = value
            kind, alike = f"{name_of(dtype)} {list(shape)}", [call, name_of(dtype), shape.numel()]
        text = call + self._members.where + (kind and f" of {kind}")
        kinds = [("value", kind or "not there")]
        return {"call": call, "kinds": kinds, "text": text, "where": place_of(code, instruction), "alike": alike}

    def _key(self, rank: int) -> str:
        return f"{self._name}/at/{rank}"

    def _read(self, name: str) -> str:
        return str(self._store.get(f"{self._name}/{name}").decode())


def _difference(told: _Told) -> str | None:
    """Give the number of the first call in which ranks differ; None if there is none that they have told."""
    for number in sorted({number for calls in told.values() for number in calls}, key=int):
        if len({str(calls[number]["alike"]) for calls in told.values() if number in calls}) > 1:
            return number
    return None


def _keep_for_ever(group: dist.ProcessGroup) -> None:
    """Keep a group from being taken down, which would wait for an operation that cannot end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
