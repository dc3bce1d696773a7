"""A run's times in Chrome's trace format, which Perfetto and chrome://tracing show. Start reading at `trace_of`.

Steps and evaluations are made by all ranks together, so they stand on one track: the log has the times of the rank that
writes it. Each rank has a track of its own for the steps whose parts are known, about one in a second. Spans of a track
are nested or apart, never across each other, as the format wants it.

Perfetto sorts entries by time, and those of the same time not as they are written: a complete span ("X") comes before a
beginning or an end ("B", "E"), and is taken to lie around it. So after one of these, nothing on its track begins in the
same microsecond, and each span takes at least one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from unisono.watch import Event

__all__ = ["trace_of"]

_PID = 1
_LOOP, _CHECKPOINTS, _CHANGES = 1, 2, 3
_FIRST_RANK = 10
"""The track of rank 0; those of the others follow."""
_PARTS = {"data": "data", "compute": "forward and backward", "waiting": "waiting", "update": "sum and update"}
"""In the order in which a step has them, though a rank may wait at several places."""
_TRACKS = {_LOOP: "epochs, steps, evaluations", _CHECKPOINTS: "checkpoints", _CHANGES: "recoveries, changes of ranks"}


def trace_of(events: Iterable[Event]) -> Iterator[str]:
    """Yield the text of a trace, in one pass and O(1) memory. Pure.

    Args:
        events: The events of a run, oldest first.
    """
    yield '{"displayTimeUnit":"ms","traceEvents":['
    before = "\n"
    for entry in _Trace().entries(events):
        yield before + json.dumps(entry, separators=(",", ":"))
        before = ",\n"
    yield "\n]}\n"


class _Trace:
    """Turns events into entries of a trace."""

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._now = 0
        """Microseconds since the first event, at the latest one."""
        self._end = dict.fromkeys(_TRACKS, 0)
        """The end of the last span of each track."""
        self._step: tuple[int, int, Any] = (0, 0, None)
        """The beginning and the end of the last step, and its number."""
        self._epoch: int | None = None

    def entries(self, events: Iterable[Event]) -> Iterator[dict[str, Any]]:
        for track, name in _TRACKS.items():
            yield from _named(track, name)
        for event in events:
            time_s = _number(event.get("time"))
            if time_s is None:
                continue
            if self._first_s is None:
                self._first_s = time_s
            now = max(self._now, round(1e6 * (time_s - self._first_s)))
            if event.get("event") in ("run", "epoch", "end", "failure"):
                yield from self._close_epoch(now if event.get("event") in ("end", "epoch") else self._now)
            self._now = now
            yield from self._entries_of(event)
        yield from self._close_epoch(self._now)

    def _entries_of(self, event: Event) -> Iterator[dict[str, Any]]:
        kind = event.get("event")
        if kind == "run":
            name = f"unisono run, {event.get('world_size')} ranks"
            yield {"ph": "M", "name": "process_name", "pid": _PID, "args": {"name": name}}
            yield self._instant("run starts", _without(event))
            yield self._counter("ranks", event.get("world_size"))
        elif kind == "epoch":
            self._epoch = max(self._now, self._end[_LOOP])
            self._end[_LOOP] = self._epoch + 1
            yield {**self._at(_LOOP, self._epoch), "ph": "B", "name": f"epoch {event.get('epoch')}", "cat": "epoch"}
        elif kind == "step":
            span = self._span(_LOOP, f"step {event.get('total_steps')}", "step", event, event.get("step_s"))
            self._step = span["ts"], self._end[_LOOP], event.get("total_steps")
            yield span
            for name in ("loss", "lr", "grad_norm", "memory"):
                if name in event and (value := _number(event[name])) is not None:
                    yield self._counter(name, value)
        elif kind == "times":
            yield from self._ranks(event)
        elif kind == "evaluation":
            yield self._span(_LOOP, f"evaluation {event.get('name')}", "evaluation", event, event.get("seconds"))
        elif kind == "checkpoint":
            name = f"checkpoint of step {event.get('total_steps')}"
            yield self._span(_CHECKPOINTS, name, "checkpoint", event, event.get("seconds"))
        elif kind == "recovery":
            yield self._span(_CHANGES, f"ranks {event.get('ranks')} replaced", "wait", event, event.get("seconds"))
        elif kind == "resize":
            name = f"{event.get('before')} to {event.get('ranks')} ranks"
            yield self._span(_CHANGES, name, "wait", event, event.get("seconds"))
            yield self._counter("ranks", event.get("ranks"))
        elif kind in ("warning", "failure", "end"):
            yield self._instant(str(kind), _without(event))

    def _ranks(self, event: Event) -> Iterator[dict[str, Any]]:
        """Yield the parts of the last step on each rank, as long as it, and ending with it: clocks of ranks differ."""
        begun, ended, step = self._step
        last = event.get("last")
        if step is None or step != event.get("total_steps") or not isinstance(last, Mapping):
            return
        # Without the time of the update, it is in that of computing, as are other parts of the step.
        told_as = _PARTS if "update" in last else {**_PARTS, "compute": "compute"}
        parts = {told: each for name, told in told_as.items() if isinstance(each := last.get(name), list)}
        for rank in range(min(map(len, parts.values()), default=0)):
            track = _FIRST_RANK + rank
            if track not in self._end:
                self._end[track] = 0
                yield from _named(track, f"rank {rank}")
            lengths = {told: round(1e6 * (_number(each[rank]) or 0.0)) for told, each in parts.items()}
            at = max(begun, self._end[track], ended - sum(lengths.values()))
            if at == ended:
                continue
            whole = {"ph": "X", "name": f"step {step}", "cat": "step of a rank", "dur": ended - at, "args": {}}
            yield {**self._at(track, at), **whole}
            self._end[track] = ended
            for told, length in lengths.items():
                if length := min(length, ended - at):
                    yield {**self._at(track, at), "ph": "X", "name": told, "cat": "part", "dur": length, "args": {}}
                    at += length

    def _close_epoch(self, now: int) -> Iterator[dict[str, Any]]:
        if self._epoch is not None:
            ended = max(now, self._end[_LOOP])
            self._epoch, self._end[_LOOP] = None, ended + 1
            yield {**self._at(_LOOP, ended), "ph": "E"}

    def _span(self, track: int, name: str, category: str, event: Event, seconds: Any) -> dict[str, Any]:
        length = max(1, round(1e6 * (_number(seconds) or 0.0)))
        begun = max(self._end[track], self._now - length)
        ended = self._end[track] = max(begun + 1, self._now)
        own = {"ph": "X", "name": name, "cat": category, "dur": ended - begun, "args": _without(event)}
        return {**self._at(track, begun), **own}

    def _instant(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**self._at(_LOOP, self._now), "ph": "i", "s": "p", "name": name, "args": arguments}

    def _counter(self, name: str, value: Any) -> dict[str, Any]:
        return {"ph": "C", "name": name, "pid": _PID, "ts": self._now, "args": {"value": _number(value) or 0}}

    def _at(self, track: int, now: int) -> dict[str, Any]:
        return {"pid": _PID, "tid": track, "ts": now}


def _named(track: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "thread_name", "pid": _PID, "tid": track, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": _PID, "tid": track, "args": {"sort_index": track}}


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _without(event: Event) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("time", "event")}
