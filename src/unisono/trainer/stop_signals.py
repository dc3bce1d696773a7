"""Ending a run when the system asks for it: SIGTERM, which batch systems send before they kill, and Ctrl-C.

By default, SIGTERM ends Python at once, without exit handlers, and Ctrl-C raises KeyboardInterrupt at any line. With
`StopSignals`, both are raised where the state of the run can be saved: at once if it can be saved now, otherwise when
the loop asks for the next batch. Start reading at `StopSignals.__call__`.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from unisono.program_end import note_signal

__all__ = ["StopSignals", "ignore_at_end"]

# A terminal sends Ctrl-C to all processes of a job, and some launchers forward it too: that does not count as a second.
_SAME_S = 0.5
# Ranks other than 0 continue for this long, and until their next step is done, so that rank 0 can end its step.
_LINGER_S = 1.0

_Stop = Callable[[], bool]


def ignore_at_end() -> None:
    """Ignore SIGTERM while the process ends, after all that is registered to be called at exit from now on.

    There is nothing left to save then, and an exception would be printed as one that is ignored.
    """
    atexit.register(_ignore)


def _ignore() -> None:
    if isinstance(signal.getsignal(signal.SIGTERM), StopSignals):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class StopSignals:
    """Turns SIGTERM into SystemExit(143), the code that a shell reports for it, and SIGINT into KeyboardInterrupt."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._guards: list[tuple[weakref.WeakMethod[_Stop], weakref.WeakMethod[Callable[[str], None]]]] = []
        self._signum: int | None = None
        self._came_s = 0.0
        self._asks = 0

    @classmethod
    def install(cls, can_stop: _Stop, tell: Callable[[str], None]) -> StopSignals | None:
        """Handle SIGTERM and SIGINT from now on, each only if it has Python's default handler.

        Args:
            can_stop: A bound method that returns True while a signal may be raised at once.
            tell: A bound method that is called with a sentence when a signal is put off. The object of these methods is
                not kept alive.

        Returns:
            The handler, which several callers share. None if the user has handlers for both signals, or outside of the
            main thread, where Python allows none.
        """
        handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
        found = next((each for each in handlers.values() if isinstance(each, cls)), None)
        if found is None:
            free = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
            ours = [signum for signum, handler in handlers.items() if handler is free[signum]]
            if not ours or threading.current_thread() is not threading.main_thread():
                return None
            found = cls()
            for signum in ours:
                signal.signal(signum, found)
        found._guards.append((weakref.WeakMethod(can_stop), weakref.WeakMethod(tell)))
        return found

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        """Handle a signal; called by the interpreter."""
        now_s = time.monotonic()
        if os.getpid() != self._pid:  # a worker that was forked
            self._raise(signum)
        again = self._signum is not None
        if again and signum == signal.SIGINT and now_s - self._came_s > _SAME_S:
            self._raise(signum)
        if not again:
            self._signum, self._came_s, self._asks = signum, now_s, 0
        guards = [(can_stop(), tell()) for can_stop, tell in self._guards]
        if all(can_stop is None or can_stop() for can_stop, _ in guards):
            self._raise(self._signum or signum)
        if not again:
            name = "Ctrl-C" if signum == signal.SIGINT else "SIGTERM"
            more = "; Ctrl-C again ends it at once" if signum == signal.SIGINT else ""
            for can_stop, tell in guards:
                if can_stop is not None and tell is not None and not can_stop():
                    tell(f"{name}: the run ends when its loop asks for the next batch, where it can be saved{more}")

    @property
    def is_pending(self) -> bool:
        """True if a signal was put off."""
        return self._signum is not None

    def is_due(self, *, is_main: bool) -> bool:
        """Return True if a signal was put off and must be raised now, where the loop asks for its next batch or epoch.

        Rank 0 stops first, since it may need the others to end its own step. Unless they fail when rank 0 ends, they
        continue for a second and one more step.
        """
        if self._signum is None:
            return False
        self._asks += 1
        return is_main or (self._asks > 1 and time.monotonic() - self._came_s > _LINGER_S)

    def raise_pending(self, *, also_terminated: bool = True) -> None:
        """Raise the exception of a signal that was put off, if there is one.

        Args:
            also_terminated: False if SIGTERM is put off further.
        """
        if self._signum is not None and (also_terminated or self._signum != signal.SIGTERM):
            self._raise(self._signum)

    def _raise(self, signum: int) -> NoReturn:
        self._signum = None
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        note_signal("SIGTERM", "asked to end, as by a batch system")
        # A second SIGTERM must not interrupt saving; SIGKILL still ends the process.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + signal.SIGTERM)
