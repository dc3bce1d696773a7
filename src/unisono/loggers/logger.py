"""The base class of loggers: a queue of events, and a thread that writes them, so that no step waits for it.

Rank 0 calls a logger with each event; on other ranks it is never called. The thread gathers events for half a second
and writes them together, since each time it wakes up it takes the interpreter from the training loop. The end of the
run and the exit of the process wait for it, also after an exception.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.loggers.rows import Row, read_row, steps_done
from unisono.program_end import ending
from unisono.watch.event_kinds import Event

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Logger", "import_library"]

_GATHER_S = 0.5
_MOST_EVENTS = 20_000
"""About 20 MB. With more, events of kinds that occur in every step are dropped."""
_FREQUENT = frozenset({"step", "log", "progress"})
_PATIENCE_S = 60.0
"""How long the end of a run, and that of the process, wait for the remaining events."""


class Logger:
    """A listener that writes events in its own thread. The base class of all loggers, and of yours.

        class Printer(unisono.loggers.Logger):
            def write(self, rows):
                for row in rows:
                    print(row.step, row.values)

        trainer = unisono.Trainer(model, optimizer, virtual_ranks=8, listeners=[Printer()])

    The four methods `begin`, `resume`, `write` and `finish` are called in the thread, one at a time. If one of them
    raises an exception, the logger is switched off with a warning, and the run continues.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queue: deque[Event] = deque()
        self._thread: threading.Thread | None = None
        self._owner = os.getpid()
        self._accepted = self._written = self._wanted = self._missed = 0
        self._closing = self._failed = self._off = False
        self._step = 0
        self._run_folder: Path | None = None

    def begin(self, facts: Event) -> None:
        """Handle the start of a run.

        Args:
            facts: The event "run".
        """

    def resume(self, step: int) -> None:
        """Handle a resume from a checkpoint: later steps, even if they have been written, are repeated.

        Args:
            step: The number of steps in the checkpoint.
        """

    def write(self, rows: Sequence[Row]) -> None:
        """Write numbers, texts and images, in the order of their steps; several rows may be of one step."""

    def finish(self, *, failed: bool) -> None:
        """Complete the output. Not called if there was no event.

        Args:
            failed: True if the process ends with an exception.
        """

    def __call__(self, event: Event) -> None:
        """Queue an event and return at once; at the end of a run, wait until all events are written."""
        if self._off or os.getpid() != self._owner:
            return
        with self._changed:
            if len(self._queue) >= _MOST_EVENTS and event["event"] in _FREQUENT:
                self._missed += 1
                if self._missed == 1:
                    self._warn(f"is {_MOST_EVENTS:,} events behind, and leaves out steps until it has caught up")
                return
            self._queue.append(event)
            self._accepted += 1
            if self._thread is None:
                # Daemonic: a service that never answers must not keep the process from ending.
                self._thread = threading.Thread(target=self._work, name=type(self).__name__, daemon=True)
                self._thread.start()
                atexit.register(self._close_at_exit)
            elif len(self._queue) == 1:
                self._changed.notify_all()
        if event["event"] == "end":
            self.flush()

    def flush(self, timeout_s: float = _PATIENCE_S) -> bool:
        """Wait until all events so far are written; return False if they are not after `timeout_s`."""
        if os.getpid() != self._owner:
            return True
        with self._changed:
            self._wanted = self._accepted
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._off or self._written >= self._wanted, timeout_s)

    def close(self, *, failed: bool = False, timeout_s: float = _PATIENCE_S) -> None:
        """Write the remaining events and end the thread; later events are dropped. Called automatically at exit."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            thread, self._closing, self._failed = self._thread, True, failed
            self._changed.notify_all()
        if thread is not None:
            atexit.unregister(self._close_at_exit)
            thread.join(timeout_s)
            if thread.is_alive() and not self._off:
                left = self._accepted - self._written
                self._warn(f"did not end within {timeout_s:g} s: {left:,} events may be lost")
        self._off = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(failed=kind is not None)

    def _close_at_exit(self) -> None:
        self.close(failed=ending() is not None)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                self._changed.wait_for(lambda: self._closing or self._wanted > self._written, _GATHER_S)
                events, closing = [*self._queue], self._closing
                self._queue.clear()
            try:
                self._take(events)
                if closing:
                    self.finish(failed=self._failed)
            except Exception as error:  # a failure of a logger, of any library, does not end a run
                self._off = True
                self._warn(f"is off, and the run goes on without it: {type(error).__name__}: {error}")
            with self._changed:
                self._written += len(events)
                self._changed.notify_all()
                if closing or self._off:
                    self._queue.clear()
                    return

    def _take(self, events: Sequence[Event]) -> None:
        rows: list[Row] = []
        for event in events:
            kind = event["event"]
            if kind == "run" and event.get("directory") is not None:
                self._run_folder = Path(event["directory"]).absolute()
            row = read_row(event, step=self._step, folder=self._run_folder)
            self._step = steps_done(event, self._step)
            if row is not None:
                rows.append(row)
            elif kind in ("run", "resume"):
                if rows:
                    self.write(rows)
                    rows = []
                if kind == "run":
                    self.begin(event)
                else:
                    self.resume(self._step)
        if rows:
            self.write(rows)

    def _warn(self, message: str) -> None:
        with suppress(OSError, ValueError):  # a standard error that is full or closed does not end a run either
            print(f"unisono: warning: {type(self).__name__} {message}", file=sys.stderr, flush=True)


def import_library(module: str, *, package: str, logger: str, distribution: str | None = None) -> Any:
    """Import the library that a logger uses.

    Args:
        module: The module to import.
        package: The package that it is in.
        logger: The name of the logger, for messages.
        distribution: What to install. None: it has the name of the package.

    Raises:
        ModuleNotFoundError: It is not installed; the message says how to install it.
    """
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        found = None
    # A folder of that name beside the script, such as the one that wandb writes, is imported as an empty module.
    if found is None or getattr(found, "__file__", None) is None:
        wanted = distribution or package
        raise ModuleNotFoundError(
            f"{logger} needs the package {wanted}, which is not installed: pip install {wanted}", name=package
        )
    return found
