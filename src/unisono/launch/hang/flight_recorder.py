"""Reads torch's flight recorder: the operations given to the backends of this process, and the unfinished ones.

Gloo and NCCL record there automatically, whichever function an operation passed; the backend shm, which is written in
Python, is asked directly. Start reading at `FlightRecorder`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from unisono import activity

__all__ = ["FlightRecorder", "has_completed", "name_tensors"]

_MOST_TENSORS = 8
_MOST_ENTRIES = 16
_DTYPES = {
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
}
"""Dtypes whose name in C++ differs from that in Python by more than its case."""


class FlightRecorder:
    """Reads the records of this process, and compares them with those at the last call."""

    def __init__(self) -> None:
        self._status: dict[str, dict[str, int]] = {}
        self._names: dict[str, str] = {}

    def look(self) -> tuple[dict[str, dict[str, int]], list[dict[str, Any]]]:
        """Return the counters of each group, and the unfinished operations.

        Those of gloo and NCCL are listed only if a group of theirs has not moved since the last look: the counters are
        cheap, but listing all records takes 0.1 s when there are thousands.
        """
        status: dict[str, dict[str, int]] = {}
        pending: list[dict[str, Any]] = []
        for name, dump in _dumps():
            counters = {f"{name} {group}": counts for group, counts in _read_counters(dump(False)).items()}
            stuck = any(
                counts["completed"] < counts["enqueued"] and self._status.get(key) == counts
                for key, counts in counters.items()
            )
            self._status |= counters
            if stuck or not self._names.keys() >= counters.keys():
                entries = _read_entries(dump(True))
                self._names |= {f"{name} {entry['pg_id']}": entry["process_group"][0] for entry in entries}
                if stuck:
                    pending += _unfinished(entries, now_ns=time.time_ns())
            status |= {self._names.get(key, ""): counts for key, counts in counters.items()}
        _look_at_shared_memory(status, pending)
        return status, pending


def _look_at_shared_memory(status: dict[str, dict[str, int]], pending: list[dict[str, Any]]) -> None:
    """Add the groups that keep their own records."""
    for group in list(activity.groups):
        if (found := group.pending()) is None:
            continue
        number, calls = found
        status[group.group_name] = {"enqueued": number, "completed": number - bool(calls)}
        pending += [
            {
                "group": group.group_name,
                "sequence": call.number,
                "point_to_point": False,
                "name": call.name,
                "tensors": "" if call.dtype is None else f"{_dtype(call.dtype)}[{call.numel}]",
                "age_s": round(age_s, 3),
            }
            for call, age_s in calls
            if call.number  # 0 until it is its turn
        ][:_MOST_ENTRIES]


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def has_completed() -> bool:
    """Return True if a group of this process has completed an operation. Cheap."""
    status: dict[str, dict[str, int]] = {}
    _look_at_shared_memory(status, [])
    for _, dump in _dumps():
        status |= _read_counters(dump(False))
    return any(counts["completed"] > 0 for counts in status.values())


def _dumps() -> Iterator[tuple[str, Callable[[bool], bytes]]]:
    """Yield torch's functions that read its records, by name; none if the program has not imported torch."""
    native = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        dump = getattr(native, name, None)
        if dump is not None:
            yield name, dump


def _read_counters(data: bytes) -> dict[str, dict[str, int]]:
    found = json.loads(data).get("pg_status", {})
    return {
        group: {kind: int(counts[f"last_{kind}_collective"]) for kind in ("enqueued", "completed")}
        for group, counts in found.items()
    }


def _read_entries(data: bytes) -> list[dict[str, Any]]:
    """Decode the unfinished entries and the latest one of each group, oldest first."""
    start, decoder = '{"collective_seq_id"', json.JSONDecoder()
    chosen: list[dict[str, Any]] = []
    known: set[str] = set()
    for piece in reversed(data.decode(errors="replace").split(start)[1:]):
        group = piece.partition('"pg_id":')[2].partition(",")[0]
        if group not in known or '"retired":false' in piece:
            known.add(group)
            chosen.append(decoder.raw_decode(start + piece)[0])
    return chosen[::-1]


def _unfinished(entries: list[dict[str, Any]], *, now_ns: int) -> list[dict[str, Any]]:
    return [
        {
            "group": entry["process_group"][0],
            "sequence": entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
            "point_to_point": entry["is_p2p"],
            "name": entry["profiling_name"].rpartition(":")[2],
            "tensors": name_tensors(
                [
                    (_DTYPES.get(dtype, dtype.lower()), tuple(size), 0)
                    for dtype, size in zip(entry["input_dtypes"], entry["input_sizes"], strict=False)
                ]
            ),
            "age_s": round((now_ns - entry["time_created_ns"]) / 1e9, 3),
        }
        for entry in entries
        if not entry["retired"]
    ][:_MOST_ENTRIES]


def name_tensors(tensors: list[tuple[str, tuple[int, ...], int]]) -> str:
    """Format dtypes and shapes, equal neighbours once.

    >>> name_tensors([("float32", (4, 4), 16), ("float32", (4, 4), 16), ("int64", (), 1)])
    '2 × float32[4, 4], int64[]'
    """
    parts: list[tuple[str, int]] = []
    for dtype, shape, _ in tensors:
        text = f"{dtype}[{', '.join(map(str, shape))}]"
        if parts and parts[-1][0] == text:
            parts[-1] = (text, parts[-1][1] + 1)
        else:
            parts.append((text, 1))
    shown = [text if times == 1 else f"{times} × {text}" for text, times in parts[:_MOST_TENSORS]]
    return ", ".join(shown) + (f" and {len(parts) - len(shown)} more" if len(parts) > len(shown) else "")
