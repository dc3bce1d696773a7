"""The log that writes the events of a run, one JSON object per line, and its reader.

An event is a flat dict: the time (`time`, Unix seconds), the kind (`event`, one of `Kind`), and that kind's fields
(see `event_kinds` and `loop_fields`). They are appended to a file in the order of their times, so a killed process
leaves whole lines and at most one incomplete last one. Events of fast steps are written together (`held_events`). Only
one rank has a log with sinks; on the others `EventLog()` does nothing. Losing a log never ends a run: see `EventLog`.
"""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from unisono.watch.continuation import MOST_MISSING, SHARED, content_of, last_shared, missing_of, recent_of
from unisono.watch.event_kinds import (
    CheckpointFields,
    EndFields,
    Event,
    FailureFields,
    Kind,
    OverFields,
    PipelineFields,
    RecoveryFields,
    ResizeFields,
    ResumeFields,
    RunFields,
    WarningFields,
)
from unisono.watch.event_lines import event_lines
from unisono.watch.held_events import HeldEvents
from unisono.watch.loop_fields import (
    DigestFields,
    EpochFields,
    EvaluationFields,
    LogFields,
    ProgressFields,
    StepFields,
    TablesFields,
    TimesFields,
)
from unisono.watch.step_record import StepRecord, event_of

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["EventLog", "read_events"]


class EventLog:
    """Writes the events of a run to a file, to a pipe and to listeners in this process.

    Any thread may emit; a lock keeps lines whole and in the order of their times. A log without sinks returns at once.
    Losing a log does not end a run: when the pipe's reader has closed it, the pipe is dropped silently, and when the
    file cannot be written (disk full), the file is dropped after one event "warning" to the other sinks. A pipe whose
    reader is alive but does not read blocks `emit` once it is full.
    Steps, and numbers that are logged between them, wait for the file and the pipe until 0.15 s have passed since the
    last write, or an event of another kind follows; at most 0.25 s. A process that is killed loses those.
    Cost: about 7 µs for an event of kind "step" and a file, no fsync.

    Args:
        path: The file to append to; it is created with its folders if missing.
        fd: A blocking descriptor. It is duplicated, so the caller keeps (and closes) its own.
        listeners: Called in order with the dict, under the lock; their exceptions propagate out of `emit`.
        warned: Called in the same way, after them, with warnings only; also without any sink.
        continues: False if no other process ever goes on with this log, so that `latest` need not be kept.
        at_once: True to write each event at once, for a reader that acts on single steps.

    Raises:
        OSError: The file cannot be opened, or fd is not open.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        fd: int | None = None,
        listeners: Sequence[Callable[[Event], None]] = (),
        warned: Callable[[Event], None] | None = None,
        continues: bool = True,
        at_once: bool = False,
    ) -> None:
        # Reentrant: a listener, or a signal handler that runs inside `emit`, may emit too.
        self._lock = threading.RLock()
        self._held = HeldEvents(self._write_held, at_once=at_once)
        self._listeners = tuple(listeners)
        self._warned = warned
        self._continues = continues
        self._path = path
        self._file = None if path is None else _open_log(path)
        self._pipe: int | None = None
        if fd is not None:
            try:
                self._pipe = os.dup(fd)
            except OSError:
                self.close()
                raise
        self.is_silent = self._file is None and self._pipe is None and not self._listeners
        """True without a sink, and once closed."""
        self.is_muted = False
        """True to drop events, except warnings: those of calls that other ranks have made."""
        self._recent: deque[Event | StepRecord] = deque(maxlen=MOST_MISSING)
        self._told: str | None = None
        """The text of the next such event, if it is known already."""

    @property
    def recent(self) -> Sequence[Event]:
        """The latest events about calls of all ranks, also those that were dropped: what another log may not have."""
        return recent_of([event_of(each) if isinstance(each, tuple) else each for each in self._recent])

    def go_on(self, recent: Sequence[Event]) -> None:
        """Go on after ranks have been replaced: tell what is missing, and nothing twice.

        Args:
            recent: The same on the rank whose state this one has got.
        """
        with self._lock:
            found = self.recent[-1] if self._recent else None
            if found is None and self._path is not None:
                found = last_shared(self._path)
            if found is not None or self._path is not None:
                for event in missing_of(recent, found):
                    self._tell(dict(event))
            if found is not None and all(content_of(found) != content_of(event) for event in recent):
                self._told = content_of(found)
            self._recent.clear()
            self._recent.extend(recent)

    def hears(self, kind: Kind, /) -> bool:
        """Return True if an event of this kind is told or kept; otherwise there is no need to make it."""
        if self.is_muted:
            return kind == "warning"
        return not self.is_silent or kind == "warning" or (self._continues and kind in SHARED)

    @overload
    def emit(self, kind: Literal["run"], /, **fields: Unpack[RunFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["resume"], /, **fields: Unpack[ResumeFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["epoch"], /, **fields: Unpack[EpochFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["step"], /, **fields: Unpack[StepFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["times"], /, **fields: Unpack[TimesFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["tables"], /, **fields: Unpack[TablesFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["evaluation"], /, **fields: Unpack[EvaluationFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["log"], /, **fields: Unpack[LogFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["checkpoint"], /, **fields: Unpack[CheckpointFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["recovery"], /, **fields: Unpack[RecoveryFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["resize"], /, **fields: Unpack[ResizeFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["pipeline"], /, **fields: Unpack[PipelineFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["warning"], /, **fields: Unpack[WarningFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["over"], /, **fields: Unpack[OverFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["end"], /, **fields: Unpack[EndFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["digest"], /, **fields: Unpack[DigestFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["failure"], /, **fields: Unpack[FailureFields]) -> None: ...
    @overload
    def emit(self, kind: Literal["progress"], /, **fields: Unpack[ProgressFields]) -> None: ...
    def emit(self, kind: Kind, /, **fields: Any) -> None:
        """Send an event with the current time to all sinks.

        JSON has no NaN: a float that is not finite is written as the text "nan", "inf" or "-inf", which Python's
        `float` reads back. Listeners get the float itself.

        Raises:
            TypeError: JSON cannot represent a field, such as a tensor; nothing is written then.
        """
        if (self.is_silent or self.is_muted) and not self.hears(kind):
            return
        event = {"time": time.time(), "event": kind, **fields}
        if (kind == "step" and self._told is None) or (kind == "log" and self._held):
            if self._continues and kind in SHARED:
                self._recent.append(event)
            _round_times(event)
            if (self._file is not None or self._pipe is not None) and self._held.add(event, event["time"]):
                self._write_held()
            if self._listeners:
                self._call_listeners(event)
            return
        with self._lock:
            event["time"] = time.time()  # in the order of lines
            _round_times(event)
            if self._continues and kind in SHARED:
                self._recent.append(event)
                told, self._told = self._told, None
                if told is not None and content_of(event) == told:
                    return
            if not self.is_silent:
                self._tell(event)
            if kind == "warning" and self._warned is not None:
                self._warned(event)

    def _tell(self, event: dict[str, Any]) -> None:
        """Send an event to all sinks, after those that are held."""
        self._write([*self._held.take(), event])
        self._call_listeners(event)

    def _call_listeners(self, event: Event) -> None:
        with self._lock:
            for listener in self._listeners:
                listener(event)

    def _write_held(self) -> None:
        with self._lock:
            if held := self._held.take():
                self._write(held)

    def _write(self, events: Sequence[Event | StepRecord]) -> None:
        if self._file is None and self._pipe is None:
            return
        lines = event_lines(events)
        if self._pipe is not None:
            try:
                _write(self._pipe, lines)
            except OSError:
                self._drop_pipe()
        if self._file is not None:
            try:
                _write(self._file, lines)
            except OSError as error:
                self._drop_file()
                reason = f"{self._path} cannot be written ({error.strerror})"
                self.emit("warning", message=f"{reason}; the run goes on without this event log")

    def emit_step(self, record: StepRecord) -> None:
        """Send the event "step" to all sinks: as `emit`, but for less, in each step of a run."""
        if self._listeners or self._told is not None or self.is_muted:
            event = event_of(record)
            self.emit("step", **{key: each for key, each in event.items() if key not in ("time", "event")})
            return
        if self._continues:
            self._recent.append(record)
        if self.is_silent:
            return
        held = self._held
        held.events.append(record)  # as `HeldEvents.add` does, without a call
        if not held.written_s <= record[0] < held.until_s and held.is_due(record[0]):
            self._write_held()

    def tell_listeners(self, kind: Kind, /, **fields: Any) -> None:
        """Send an event to the listeners in this process alone, which are new, unlike the file and the pipe."""
        self._call_listeners({"time": round(time.time(), 6), "event": kind, **fields})

    def close(self) -> None:
        """Close the sinks; later events are dropped. May be called again."""
        self._write_held()
        with self._lock:
            self._held.close()
            self.is_silent = True
            self._listeners, self._warned = (), None
            self._drop_pipe()
            self._drop_file()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A Trainer that is garbage-collected in mid-run leaves no open file.
        if hasattr(self, "is_silent"):
            self.close()

    def _drop_pipe(self) -> None:
        fd, self._pipe = self._pipe, None
        if fd is not None:
            os.close(fd)

    def _drop_file(self) -> None:
        fd, self._file = self._file, None
        if fd is not None:
            os.close(fd)


def read_events(path: Path) -> Iterator[Event]:
    """Yield the events of a log from its start, also while it is being written.

    A line that a killed run left incomplete (the last one, or one in the middle once a later run has continued) is
    skipped. Floats that were not finite come as the text "nan", "inf" or "-inf": `float(event["loss"])` takes either.
    O(1) memory.

    Raises:
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # incomplete: never valid JSON, since its last brace is missing
            if isinstance(event, dict):
                yield event


def _round_times(event: dict[str, Any]) -> None:
    event["time"] = round(event["time"], 6)
    if "step_s" in event:
        event["step_s"] = round(event["step_s"], 6)


def _open_log(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        status = os.fstat(fd)
        # A killed run may have left its last line incomplete: new lines must not become a part of it. The incomplete
        # line is kept: it may be the only trace of the last moment, and a log does not truncate files.
        if stat.S_ISREG(status.st_mode) and status.st_size and os.pread(fd, 1, status.st_size - 1) != b"\n":
            _write(fd, b"\n")
    except OSError:
        os.close(fd)
        raise
    return fd


def _write(fd: int, line: bytes) -> None:
    written = os.write(fd, line)
    # A disk that is nearly full takes a part. Another write completes the line, or raises the reason why it cannot.
    while written < len(line):
        written += os.write(fd, line[written:])
