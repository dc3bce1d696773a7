"""Ending a run when the system asks for it: batch systems send SIGTERM before they kill, and so does the launcher.

By itself SIGTERM ends Python at once, without exit handlers. With a `Terminator` it raises SystemExit instead, so that
what runs at exit can save; while the state is being written, only when that is done.
"""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType

__all__ = ["Terminator"]


class Terminator:
    """Turns SIGTERM into SystemExit(143), the exit code that a shell reports for that signal."""

    def __init__(self) -> None:
        self._guards: list[weakref.WeakMethod[Callable[[], bool]]] = []
        self._pending = False

    @classmethod
    def install(cls, is_writing: Callable[[], bool]) -> Terminator | None:
        """Handle SIGTERM from now on, if nobody else does.

        Args: is_writing is a bound method that tells whether the state is being written; its object is not kept alive.
        Returns: the handler, which several callers share; None where a handler of the user's has the signal, or
            outside of the main thread, where Python allows none.
        """
        handler = signal.getsignal(signal.SIGTERM)
        if not isinstance(handler, cls):
            if handler != signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
                return None
            handler = cls()
            signal.signal(signal.SIGTERM, handler)
        handler._guards.append(weakref.WeakMethod(is_writing))
        return handler

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        """Handle the signal; called by the interpreter."""
        self._pending = True
        self.check()

    def check(self) -> None:
        """Raise SystemExit if the signal has come, unless state is being written."""
        if self._pending and not any(guard is not None and guard() for guard in [ref() for ref in self._guards]):
            # Saving must not be interrupted in its turn; who is in a hurry kills.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            raise SystemExit(128 + signal.SIGTERM)
