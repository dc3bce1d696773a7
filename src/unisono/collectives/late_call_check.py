"""The check of late calls: collectives that have not ended after a second are compared, over the job's store.

Ranks that make different calls would wait for each other for ever in gloo. A call that ends in time costs no more than
a record of it. Check mode (`collectives.check_mode`) compares every call before it begins. Start reading at
`LateCallChecker.run`.
"""

from __future__ import annotations

import json
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

from unisono.collectives.call_description import ComparisonPlace, difference, place_of, user_frame
from unisono.collectives.reduce_ops import name_of
from unisono.errors import RankMismatchError
from unisono.job.connection_watch import keep_for_ever
from unisono.job.current import connection_watch
from unisono.text import without_cpp_place

__all__ = ["CallTemplate", "LateCallChecker"]

_SLICE = timedelta(seconds=0.1)
_PATIENCE = 10
"""How many slices of time a call runs before it is compared."""
_PAUSE = timedelta(seconds=0.5)
"""Time between looks for the findings of other ranks."""
_KEPT = 32
"""Calls that a rank remembers. A root of small broadcasts may be far ahead of ranks that wait in another call."""
_NEIGHBOURS = 16
"""Ranks on either side that each compares with. If not all in a ring are equal, two neighbours differ."""
_FOR_OTHERS_S = 1.5
"""Seconds that a rank waits before it raises: for ranks that are just arriving, and until all have read the reason."""


CallTemplate = tuple[str, object]
"""The operation as users know it, and the argument for the {!r} in it; None if it has none."""


_PendingCalls = dict[int, dict[str, dict[str, Any]]]
"""By rank, its latest calls up to the pending one, by number."""


_CallRecord = tuple[CallTemplate, str | tuple[torch.dtype, torch.Size], CodeType, int]
"""One call of this rank, without references that keep its value alive: the call, a description of the value or a
tensor's type and shape, and the place in the user's code. A plain tuple, since every call makes one."""


class LateCallChecker:
    """Records the calls of one group, and compares them over the job's store when one is late.

    Args:
        place: The ranks and their store.
    """

    def __init__(self, place: ComparisonPlace) -> None:
        self._store, self._name, self._own, self._ranks, self._where = place
        self._lock = threading.RLock()  # calls are counted in the order in which the backend gets them
        self._records: deque[_CallRecord] = deque(maxlen=_KEPT)
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
        """Run an operation of torch.distributed to its end. Called by `Group._run` alone.

        Args:
            call: The name of the call.
            value: A tensor, whose type and size must be equal on all ranks, or a description of what may differ.
            operation: A function of torch.distributed.
            args: Its arguments.
            kwargs: Its keyword arguments, with the group.

        Raises:
            RankMismatchError: Ranks make different calls, or did so before.
            RuntimeError: The backend's error, with this rank's call.
        """
        if self._broken is not None:
            raise RankMismatchError(self._broken)
        with self._lock:
            work: dist.Work = operation(*args, async_op=True, **kwargs)
            # Meanwhile gloo's thread works.
            frame = user_frame(above=3)  # Group._run, Group.run and its caller
            described = value if isinstance(value, str) else (value.dtype, value.shape)
            record = (call, described, frame.f_code, frame.f_lasti)
            self._records.append(record)
            self._count += 1
        try:
            if not _has_ended_well(work):
                self._wait(work, record)
        finally:
            if not work.is_completed():
                keep_for_ever(kwargs["group"])

    def _wait(self, work: dist.Work, record: _CallRecord) -> None:
        """Wait for a call that is late or has failed."""
        looks, published = True, False
        while not work.is_completed():
            _check_connections()
            if looks:
                looks = self._look(first=not published)
                published = True
            with suppress(RuntimeError):  # a failure is raised below
                work.wait(_PAUSE)
        if looks and published:
            with suppress(RuntimeError):
                self._store.set(self._key(self._own), "{}")  # not deleted: others may be about to get it
        try:
            work.wait()
        except RuntimeError as error:
            if published:  # the others may have ended because of a mismatch
                with suppress(RuntimeError):
                    if self._store.check([f"{self._name}/told"]):
                        raise RankMismatchError(self._read("told")) from error
            raise RuntimeError(self._explain(record, error)) from error

    def _explain(self, record: _CallRecord, error: RuntimeError) -> str:
        entry = self._entry(record)
        reason = without_cpp_place(str(error)).partition(". This is typically")[0].rstrip(". \n")
        return (
            f"{entry['text']} at {entry['where']} failed on rank {self._own}: {reason}.\n"
            "If another rank ended, see what it printed. gloo ends one that gets more data than it expects: `unisono "
            "run --check`, or UNISONO_CHECK=1, says which rank called this with another tensor."
        )

    def _look(self, *, first: bool) -> bool:
        """Publish the calls of this rank, and compare them with those that the others have published.

        Returns:
            True to look again; False if the store has ended.

        Raises:
            RankMismatchError: The calls differ.
        """
        try:
            if first:
                self._publish()
            if not self._store.check([f"{self._name}/told"]):
                pending = self._pending(self._neighbours()) if first else {}
                if _difference(pending) is None:
                    return True
                self._settle(pending)
            text = self._read("told")
            self._store.set(f"{self._name}/read/{self._own}", "")
            keys = [f"{self._name}/read/{rank}" for rank in self._pending(self._ranks)]
            end_s = time.monotonic() + _FOR_OTHERS_S
            while not self._store.check(keys) and time.monotonic() < end_s:
                time.sleep(0.02)
        except RuntimeError:
            return False
        self._broken = text
        raise RankMismatchError(text)

    def _publish(self) -> None:
        with self._lock:
            records, count = list(self._records), self._count
        calls = {str(count - len(records) + index): self._entry(record) for index, record in enumerate(records)}
        self._store.set(self._key(self._own), json.dumps(calls))

    def _neighbours(self) -> list[int]:
        place = self._ranks.index(self._own)
        ring = (self._ranks[place:] + self._ranks[:place]) * 2
        return sorted(set(ring[max(0, len(self._ranks) - _NEIGHBOURS) :][: 2 * _NEIGHBOURS + 1]))

    def _pending(self, ranks: Sequence[int]) -> _PendingCalls:
        """Return the pending calls of those of the ranks that wait."""
        there = [rank for rank in ranks if self._store.check([self._key(rank)])]
        found = {rank: json.loads(self._store.get(self._key(rank))) for rank in there}
        return {rank: calls for rank, calls in found.items() if calls}

    def _settle(self, pending: _PendingCalls) -> None:
        """Publish the difference between the pending calls, unless another rank does."""
        end_s = time.monotonic() + _FOR_OTHERS_S
        while len(pending) < len(self._ranks) and time.monotonic() < end_s:
            time.sleep(0.02)
            pending = {**pending, **self._pending([rank for rank in self._ranks if rank not in pending])}
        number = _difference(pending)
        assert number is not None
        entries = {rank: pending[rank][number] for rank in self._ranks if number in pending.get(rank, {})}
        absent = [rank for rank in self._ranks if rank not in entries]
        text = difference(list(entries.values()), list(entries), absent=absent)
        self._store.compare_set(f"{self._name}/told", "", text or "ranks call different things")

    def _entry(self, record: _CallRecord) -> dict[str, Any]:
        """Return the description of a call for other ranks. Calls with equal "alike" complete together."""
        (template, argument), value, code, instruction = record
        call = template if argument is None else template.format(argument)
        if isinstance(value, str):
            kind, alike = value, [call, "", 0]
        else:
            dtype, shape = value
            kind, alike = f"{name_of(dtype)} {list(shape)}", [call, name_of(dtype), shape.numel()]
        text = call + self._where + (kind and f" of {kind}")
        kinds = [("value", kind or "not there")]
        return {"call": call, "kinds": kinds, "text": text, "where": place_of(code, instruction), "alike": alike}

    def _key(self, rank: int) -> str:
        return f"{self._name}/at/{rank}"

    def _read(self, name: str) -> str:
        return str(self._store.get(f"{self._name}/{name}").decode())


def _difference(pending: _PendingCalls) -> str | None:
    """Return the number of the first published call in which ranks differ; None if there is none."""
    for number in sorted({number for calls in pending.values() for number in calls}, key=int):
        if len({str(calls[number]["alike"]) for calls in pending.values() if number in calls}) > 1:
            return number
    return None


def _has_ended_well(work: dist.Work) -> bool:
    """Return True once a call has ended, False if it is late or has failed."""
    for _ in range(_PATIENCE):
        with suppress(RuntimeError):  # late or failed; later errors must not have this one as their context
            work.wait(_SLICE)
            return True
        if work.is_completed():
            return False
        _check_connections()
    return False


def _check_connections() -> None:
    """Raise PeerError if the call cannot end any more, since a rank was lost."""
    if (watch := connection_watch()) is not None:
        watch.check()
