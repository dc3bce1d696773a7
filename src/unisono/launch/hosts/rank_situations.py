"""The agents' messages to the leader about ranks that may hang (`launch.hang.situation`), as JSON.

Clocks of hosts differ, so times are told as ages. Source lines travel with the frames of stacks: hosts need not have
the same files. Start reading at `encode_situation`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from unisono.launch.hang.situation import Pending, Situation
from unisono.launch.hang.stacks import Frame, Thread
from unisono.launch.hang.status_block import RecordedCall

__all__ = ["decode_situation", "encode_situation"]

_MOST_CALLS = 8
"""The calls that are told of each rank, beside those that run: enough to find the first that differs."""
_MOST_FRAMES = 60


def encode_situation(situation: Situation) -> dict[str, Any]:
    """Return what a rank does as JSON.

    >>> frame = Frame(file="/job/a.py", line=7, function="save", is_library=False, text="lock.acquire()")
    >>> situation = Situation(rank=3, pid=12, state="sleeping", threads=(Thread(ident=1, frames=(frame,)),))
    >>> decode_situation(encode_situation(situation)) == situation
    True
    """
    now_ns = time.monotonic_ns()
    calls = situation.calls
    return {
        "rank": situation.rank,
        "pid": situation.pid,
        "state": situation.state,
        "exit_code": situation.exit_code,
        "load": situation.load,
        "calls": [_encode_call(call, now_ns) for call in calls if call.running or call in calls[-_MOST_CALLS:]],
        "pending": [{**asdict(entry), "since_ns": now_ns - entry.since_ns} for entry in situation.pending],
        "enqueued": dict(situation.enqueued),
        "groups": {name: list(ranks) for name, ranks in situation.groups.items()},
        "main_thread": situation.main_thread,
        "threads": [_encode_thread(thread) for thread in situation.threads],
        "children": [[pid, name, list(map(_encode_thread, threads))] for pid, name, threads in situation.children],
    }


def decode_situation(told: Mapping[str, Any]) -> Situation:
    """Return what `encode_situation` was given, with times by the clock of this host."""
    now_ns = time.monotonic_ns()
    return Situation(
        **{
            **told,
            "calls": tuple(_decode_call(call, now_ns) for call in told["calls"]),
            "pending": tuple(Pending(**{**entry, "since_ns": now_ns - entry["since_ns"]}) for entry in told["pending"]),
            "groups": {name: tuple(ranks) for name, ranks in told["groups"].items()},
            "threads": tuple(map(_decode_thread, told["threads"])),
            "children": tuple((pid, name, tuple(map(_decode_thread, each))) for pid, name, each in told["children"]),
        }
    )


def _encode_call(call: RecordedCall, now_ns: int) -> dict[str, Any]:
    ended_ns = None if call.ended_ns is None else now_ns - call.ended_ns
    return {**asdict(call), "started_ns": now_ns - call.started_ns, "ended_ns": ended_ns}


def _decode_call(told: Mapping[str, Any], now_ns: int) -> RecordedCall:
    ended_ns = None if told["ended_ns"] is None else now_ns - told["ended_ns"]
    times = {"started_ns": now_ns - told["started_ns"], "ended_ns": ended_ns}
    return RecordedCall(**{**told, **times, "ranks": tuple(told["ranks"])})


def _encode_thread(thread: Thread) -> list[Any]:
    # The innermost calls come first.
    return [thread.ident, [[f.file, f.line, f.function, f.is_library, f.source] for f in thread.frames[:_MOST_FRAMES]]]


def _decode_thread(told: Sequence[Any]) -> Thread:
    ident, frames = told
    names = ("file", "line", "function", "is_library", "text")
    return Thread(ident=ident, frames=tuple(Frame(**dict(zip(names, frame, strict=True))) for frame in frames))
