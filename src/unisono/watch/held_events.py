"""Events of fast steps, which wait for a moment to be written together.

The interpreter's code and data have left the processor's caches while a step computes. So an event that is written in
each step costs four times what it costs in a row of them: 40 µs instead of 10. For the same reason holding one takes as
little code as possible. Start reading at `HeldEvents.add`.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from unisono.watch.step_record import StepRecord

__all__ = ["HeldEvents"]

_HOLD_S = 0.15
"""How long events wait while others follow."""
_LOOK_S = 0.1
"""How often the thread looks whether no event has followed. It ends when nothing is held."""


class HeldEvents:
    """The events that have not been written yet. Any thread may add; one at a time may take.

    After `add`, the caller writes them once they are due. If no other event follows, a thread has them written:
    `_HOLD_S + _LOOK_S` after they were added. So does the exit of the process, but not its death by a signal. A forked
    process has none of them, since they are its parent's.

    Args:
        write: Writes what is held. It is not kept alive; it belongs to the owner of this object.
        at_once: True to hold nothing: each event is due when it is added.
    """

    def __init__(self, write: Callable[[], None], *, at_once: bool = False) -> None:
        self._write = weakref.WeakMethod(write)
        self._at_once = at_once
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self.events: deque[dict[str, Any] | StepRecord] = deque()
        self.written_s = 0.0
        self.until_s = -math.inf
        """An event with a time from `written_s` on and before this waits: there is nothing to do for it. Minus infinity
        while no thread watches."""
        self._guard = threading.RLock()  # a signal handler may emit, too
        self._is_watched = self._has_watched = False
        self._closed = threading.Event()

    def add(self, event: dict[str, Any] | StepRecord, time_s: float) -> bool:
        """Add an event, with its time; return True if what is held must be written now."""
        self.events.append(event)
        return not self.written_s <= time_s < self.until_s and self.is_due(time_s)

    def is_due(self, time_s: float) -> bool:
        """Return True if what is held must be written now; otherwise see to it that it is written in time.

        Call it after an event has been added to `events` whose time is not before `until_s`.
        """
        # A clock that was set back must not let events wait.
        if self._at_once or not 0 <= time_s - self.written_s < _HOLD_S:
            return True
        if not self._is_watched:
            self._watch()
        return False

    def __len__(self) -> int:
        return len(self.events)

    def take(self) -> list[dict[str, Any] | StepRecord]:
        """Return the events that are held, and hold them no longer."""
        with self._guard:
            self.written_s = time.time()
            if self._is_watched:
                self.until_s = self.written_s + _HOLD_S
        return [self.events.popleft() for _ in range(len(self.events))]

    def close(self) -> None:
        """End the thread: no event follows."""
        if self._process == os.getpid():
            atexit.unregister(self._write_held)
            self._closed.set()

    def _watch(self) -> None:
        if not self._has_watched:
            self._has_watched = True
            atexit.register(self._write_held)
            os.register_at_fork(after_in_child=partial(_begin_anew, weakref.ref(self)))
        self._set_watched(True)
        # It holds no lock and no file while it waits, so that nobody has to wait for its end.
        threading.Thread(target=self._work, name="unisono-events", daemon=True).start()

    def _set_watched(self, is_watched: bool) -> None:
        with self._guard:
            self._is_watched = is_watched
            self.until_s = self.written_s + _HOLD_S if is_watched else -math.inf

    def _work(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if not self.events:
                self._set_watched(False)
                if not self.events:
                    return
                self._set_watched(True)  # one was added just before
            elif time.time() - self.written_s >= _HOLD_S:
                self._write_held()

    def _write_held(self) -> None:
        write = self._write()
        if write is not None and self._process == os.getpid():
            write()


def _begin_anew(reference: weakref.ref[HeldEvents]) -> None:
    held = reference()
    if held is not None:
        held._begin()
