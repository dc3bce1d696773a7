"""The status block that a rank shares with its agent: the rank's calls in its process groups, and its failure.

A file in memory (memfd), mapped by both. The rank writes, the agent reads at any time, also when the rank was stopped
or killed. Records carry a checksum, so a reader never accepts a half-written one. Start reading at `StatusBlock`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Any, Literal

from unisono.launch.hang.call_times import CallTime
from unisono.text import clip, parse_ranks

__all__ = ["CallKind", "RecordedCall", "StatusBlock", "create", "encode_call"]

_MAGIC = b"unisono1"
_SIZE = 512 << 10  # pages that are never written take no memory
# pid, main thread, calls begun, calls completed, calls ended with an error or without, finished, places of calls, left
# its groups, whether ranks have met
_HEADER = struct.Struct("QQQQQQQQQ")
_BEGUN, _COMPLETED_AND_ENDED = struct.Struct("Q"), struct.Struct("QQ")
_HEADER_AT = 8

# Calls: the latest ones, one per place. The end of a call is written without touching the rest of its record.
# They use the first places in turn. While running calls of threads occupy all of these, further places are used.
_PLACES, _MOST_PLACES, _PLACE_SIZE, _CALLS_AT = 32, 448, 768, 4096
_END = struct.Struct("Qq")  # number of the call that ended, and when; a negative time after an error
_START = struct.Struct("IIQqQQ")  # checksum of all that follows, length of the text, number, start, sequence, epoch
_TIME = struct.Struct("QqIIQq")  # both of these, up to the start
_SHARED_PLACE = _MOST_PLACES - 1
"""The place of all calls for which there is no other one: only the latest of them can be read."""
_LONGEST_TEXT = _PLACE_SIZE - _END.size - _START.size

# Texts: checksum, length and number, then JSON. Answers alternate between two halves, so that one is always whole.
_TEXT = struct.Struct("IIQ")
_ANSWER_AT, _ANSWER_SIZE = _CALLS_AT + _MOST_PLACES * _PLACE_SIZE, 24 << 10
_FAILURE_AT, _FAILURE_SIZE = _ANSWER_AT + 2 * _ANSWER_SIZE, 48 << 10

CallKind = Literal["collective", "point-to-point", "message", "setup"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """One call of a torch.distributed function, as its rank has recorded it."""

    number: int
    """1 for the first call of the process."""
    name: str
    """The function, for example "all_reduce"."""
    kind: CallKind
    """A collective of a group, a send or receive, the wait for a message in a step, or a call that makes a group."""
    group: str
    """Name that torch gave the process group; "" if it is not known."""
    label: str
    """How users know the group: "the group 'tp'", "the group made at train.py:7", "the default group"; or ""."""
    ranks: tuple[int, ...]
    """The group's members, as global ranks; empty for all ranks of the job."""
    epoch: int
    """How often the default group had been made. Names and sequence numbers start over each time."""
    sequence: int
    """1 for the group's first collective in this rank and epoch, or for the first call that makes a group by this
    function; 0 for sends and receives."""
    tensors: str
    """Dtype and shape of the tensors, for example "float32[4, 4]"."""
    reduction: str
    """For example "sum"; "" where nothing is reduced."""
    peer: int | None
    """Root of the collective, destination of a send, or source of a receive; None if there is none, or for any rank."""
    signature: str
    """The properties that must be equal on all ranks of the group."""
    file: str
    """The place of the call in the user's code."""
    line: int
    function: str
    asynchronous: bool
    """True if the call only starts the operation."""
    started_ns: int
    """By the monotonic clock."""
    ended_ns: int | None
    """None while it runs."""
    failed: bool
    """True if it raised an error."""

    @property
    def running(self) -> bool:
        """True while the rank is inside the call."""
        return self.ended_ns is None


def create() -> int:
    """Create the memory of a status block, and return its file number. Programs do not inherit it."""
    file = os.memfd_create("unisono-page", os.MFD_CLOEXEC)
    os.ftruncate(file, _SIZE)
    return file


class StatusBlock:
    """A mapped status block. One process writes to it, any may read.

    Args:
        file: The number that `create` returned, or a duplicate. It may be closed afterwards.

    >>> file = create()
    >>> rank, agent = StatusBlock(file), StatusBlock(file)
    >>> rank.write_failure({"type": "ValueError", "message": "bad batch"})
    >>> agent.read_failure()
    {'type': 'ValueError', 'message': 'bad batch'}
    >>> number = rank.begin(b'{"name": "barrier"}', sequence=1)
    >>> [(call.name, call.sequence, call.running) for call in agent.calls()]
    [('barrier', 1, True)]
    >>> rank.end(number)
    >>> agent.completed, agent.calls()[0].running
    (1, False)
    >>> os.close(file)
    """

    def __init__(self, file: int) -> None:
        self._map = mmap.mmap(file, _SIZE)
        self._numbers = count(1)
        self._open = [0] * _PLACES  # by place, the number of the call that is still running there
        self._spare = list(range(_SHARED_PLACE - 1, _PLACES - 1, -1))  # further places; the last one is taken first
        self._apart: dict[int, int] = {}  # by number, the further places of calls that are still running
        self._used = _PLACES
        self._answers = count(1)
        self._done = self._ended = 0

    def close(self) -> None:
        """Unmap the status block."""
        self._map.close()

    # Written by the rank.

    def claim(self, *, pid: int, main_thread: int) -> None:
        """Record which process owns the block; main_thread is the `threading.get_ident()` of its main thread."""
        self._map[: len(_MAGIC)] = _MAGIC
        struct.pack_into("QQ", self._map, _HEADER_AT, pid, main_thread)

    def begin(self, text: bytes, *, sequence: int = 0, epoch: int = 0) -> int:
        """Record that a call begins, with its text from `encode_call`, and return its number for `end`."""
        number = next(self._numbers)  # threads that call at the same time get different numbers
        place = number % _PLACES
        if self._open[place]:
            number, place = self._take_place()
        else:
            self._open[place] = number
        body = _START.pack(0, len(text), number, time.monotonic_ns(), sequence, epoch)[4:] + text
        at = _CALLS_AT + place * _PLACE_SIZE + _END.size
        self._map[at : at + 4 + len(body)] = zlib.crc32(body).to_bytes(4, sys.byteorder) + body
        _BEGUN.pack_into(self._map, _HEADER_AT + 16, number)
        return number

    def end(self, number: int, *, failed: bool = False) -> None:
        """Record that a call has ended."""
        apart = self._apart.pop(number, None) if self._apart else None
        place = number % _PLACES if apart is None else apart
        now_ns = time.monotonic_ns()
        _END.pack_into(self._map, _CALLS_AT + place * _PLACE_SIZE, number, -now_ns if failed else now_ns)
        if apart is None:
            self._open[place] = 0
        elif apart != _SHARED_PLACE:
            self._spare.append(apart)
        self._ended += 1
        if not failed:
            self._done += 1
        _COMPLETED_AND_ENDED.pack_into(self._map, _HEADER_AT + 24, self._done, self._ended)

    def _take_place(self) -> tuple[int, int]:
        """Find a place for a call when the next one in turn is occupied. Return the call's number, and the place."""
        for number in islice(self._numbers, _PLACES):
            place = number % _PLACES
            if not self._open[place]:
                self._open[place] = number
                return number, place
        number = next(self._numbers)
        try:
            place = self._spare.pop()
        except IndexError:
            place = _SHARED_PLACE
        self._apart[number] = place
        if place >= self._used:
            self._used = place + 1
            struct.pack_into("Q", self._map, _HEADER_AT + 48, self._used)
        return number, place

    def note_meeting(self) -> None:
        """Record that a collective has completed that is not among the recorded calls."""
        struct.pack_into("Q", self._map, _HEADER_AT + 64, 1)

    def note_finish(self) -> None:
        """Record that the program has ended without an error. Its process may take a while longer."""
        struct.pack_into("Q", self._map, _HEADER_AT + 40, time.monotonic_ns())

    def note_groups(self, *, left: bool) -> None:
        """Record that the rank leaves its process groups, or makes new ones."""
        struct.pack_into("Q", self._map, _HEADER_AT + 56, time.monotonic_ns() if left else 0)

    def write_failure(self, account: Mapping[str, Any]) -> None:
        """Write how the rank failed. The longest texts lose their middle if the record exceeds 48 KiB."""
        self._write(_FAILURE_AT, _FAILURE_SIZE, _fit(dict(account), _FAILURE_SIZE - _TEXT.size), 1)

    def write_answer(self, answer: Mapping[str, Any]) -> None:
        """Write the answer to a question of the agent."""
        number = next(self._answers)
        at = _ANSWER_AT + number % 2 * _ANSWER_SIZE
        self._write(at, _ANSWER_SIZE, _fit(dict(answer), _ANSWER_SIZE - _TEXT.size), number)

    # Read by the agent.

    @property
    def pid(self) -> int:
        """The rank's process id, as the rank sees it; 0 before it has claimed the status block."""
        return int(self._header()[0])

    @property
    def main_thread(self) -> int:
        """Identifier of the rank's main thread, as in a stack dump."""
        return int(self._header()[1])

    @property
    def begun(self) -> int:
        """Number of the latest call."""
        return int(self._header()[2])

    @property
    def completed(self) -> int:
        """The number of calls that have ended without an error, including those that make groups."""
        return int(self._header()[3])

    @property
    def mark(self) -> tuple[int, int]:
        """A value that changes whenever a call begins or ends, with an error or without: the numbers of both."""
        header = self._header()
        return header[2], header[4]

    @property
    def finished_ns(self) -> int | None:
        """When the program ended without an error, by the monotonic clock; None if it has not."""
        return int(self._header()[5]) or None

    @property
    def left_ns(self) -> int | None:
        """When the rank left its process groups, by the monotonic clock; None if it has made none, or is in them."""
        return int(self._header()[7]) or None

    @property
    def met(self) -> bool:
        """True if a collective, send or receive has completed: the rank has reached the exchange with its peers."""
        return bool(self._header()[8]) or any(
            call.kind != "setup" and not call.running and not call.failed and not call.asynchronous
            for call in self.calls()
        )

    def calls(self) -> list[RecordedCall]:
        """Return the latest calls, the newest last. The first 447 that run at the same time are all included."""
        found = (self._call(place) for place in range(max(_PLACES, self._header()[6])))
        return sorted((call for call in found if call is not None), key=lambda call: call.number)

    def times(self) -> list[CallTime]:
        """Return when the calls that `calls` returns began and ended. That is a tenth of the work of `calls`."""
        found = []
        for place in range(max(_PLACES, self._header()[6])):
            ended, ended_ns, _, _, number, started_ns = _TIME.unpack_from(self._map, _CALLS_AT + place * _PLACE_SIZE)
            if number:
                found.append(CallTime(number, started_ns, abs(ended_ns) if ended == number else None, place))
        return sorted(found)

    def call_at(self, place: int) -> RecordedCall | None:
        """Return the call at a place that `times` told; None if it is just being written."""
        return self._call(place)

    def read_failure(self) -> dict[str, Any] | None:
        """Return the record that the rank has written of its failure; None if there is none."""
        found = self._read(_FAILURE_AT, _FAILURE_SIZE)
        return found[1] if found else None

    def read_answer(self) -> tuple[int, dict[str, Any]] | None:
        """Return the number of the latest answer, counted from 1, and the answer; None if there is none."""
        halves = [self._read(_ANSWER_AT + half * _ANSWER_SIZE, _ANSWER_SIZE) for half in range(2)]
        return max((half for half in halves if half), key=lambda half: half[0], default=None)

    def _header(self) -> tuple[Any, ...]:
        return _HEADER.unpack_from(self._map, _HEADER_AT)

    def _call(self, place: int) -> RecordedCall | None:
        data = self._place(place)
        ended, ended_ns = _END.unpack_from(data)
        checksum, length, number, started_ns, sequence, epoch = _START.unpack_from(data, _END.size)
        if number == 0 or length > _LONGEST_TEXT:
            return None
        body = data[_END.size + 4 : _END.size + _START.size + length]
        if zlib.crc32(body) != checksum:
            return None
        over = ended == number
        return RecordedCall(
            number=number,
            sequence=sequence,
            epoch=epoch,
            started_ns=started_ns,
            ended_ns=abs(ended_ns) if over else None,
            failed=over and ended_ns < 0,
            **_parse(body[_START.size - 4 :]),
        )

    def _place(self, place: int) -> bytes:
        at = _CALLS_AT + place * _PLACE_SIZE
        return self._map[at : at + _PLACE_SIZE]

    def _write(self, at: int, size: int, text: bytes, number: int) -> None:
        body = _TEXT.pack(0, len(text), number)[4:] + text
        assert 4 + len(body) <= size
        self._map[at : at + 4 + len(body)] = zlib.crc32(body).to_bytes(4, sys.byteorder) + body

    def _read(self, at: int, size: int) -> tuple[int, dict[str, Any]] | None:
        checksum, length, number = _TEXT.unpack_from(self._map, at)
        if number == 0 or length > size - _TEXT.size:
            return None
        body = self._map[at + 4 : at + _TEXT.size + length]
        return (number, json.loads(body[_TEXT.size - 4 :])) if zlib.crc32(body) == checksum else None


def encode_call(
    *,
    name: str,
    kind: CallKind,
    group: str = "",
    label: str = "",
    ranks: str = "",
    tensors: str = "",
    reduction: str = "",
    peer: int | None = None,
    signature: str = "",
    file: str = "",
    line: int = 0,
    function: str = "",
    asynchronous: bool = False,
) -> bytes:
    """Return the text of a call for `StatusBlock.begin`; ranks are as `format_ranks` writes them. Cuts long parts."""
    call: dict[str, Any] = {"name": name, "kind": kind, "group": group, "label": label, "ranks": ranks}
    call |= {"tensors": tensors}
    call |= {"reduction": reduction, "peer": peer, "signature": signature, "file": file, "line": line}
    return _fit({**call, "function": function, "asynchronous": asynchronous}, _LONGEST_TEXT)


@lru_cache(maxsize=4096)
def _parse(text: bytes) -> dict[str, Any]:
    told = json.loads(text)
    return {
        "name": told["name"],
        "kind": told.get("kind", "collective"),
        "group": told.get("group", ""),
        "label": told.get("label", ""),
        "ranks": parse_ranks(told.get("ranks", "")),
        "tensors": told.get("tensors", ""),
        "reduction": told.get("reduction", ""),
        "peer": told.get("peer"),
        "signature": told.get("signature", ""),
        "file": told.get("file", ""),
        "line": told.get("line", 0),
        "function": told.get("function", ""),
        "asynchronous": told.get("asynchronous", False),
    }


def _fit(content: dict[str, Any], size: int) -> bytes:
    """Encode as JSON of at most `size` bytes. The longest texts in it lose their middle if necessary."""
    longest = size
    while True:
        text = json.dumps(content, separators=(",", ":"), default=str).encode()
        if len(text) <= size:
            return text
        longest //= 2
        if longest == 0:
            return b"{}"
        content = _shorten(content, longest)


def _shorten(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return clip(value, longest, at="middle")
    if isinstance(value, dict):
        return {key: _shorten(inner, longest) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        kept = list(value)
        if len(kept) > max(8, longest):
            kept = [*kept[: longest // 2], *kept[-(longest // 2) :]] if longest > 1 else kept[:1]
        return [_shorten(inner, longest) for inner in kept]
    return value
