"""Saves the state of a run that is left when its process ends, or when its loop is freed before that.

Start reading at `Rescue`.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref

from unisono.trainer.asked_state import AskedState

__all__ = ["Rescue"]


class Rescue:
    """Watches for the end of the process and of one object, on the rank that writes checkpoints.

    Args:
        asked: The state to save.
    """

    def __init__(self, asked: AskedState) -> None:
        self._asked = asked
        self._dropped: weakref.finalize[[AskedState, int], object] | None = None
        atexit.register(_rescue, weakref.ref(asked), os.getpid())

    def watch(self, owner: object) -> None:
        """Save the state when an object is freed before the process ends, as in a function that returns.

        What is called then keeps the state alive until there is nothing to save, and must not refer to the object.
        """
        if self._dropped is None or not self._dropped.alive:
            self._dropped = weakref.finalize(owner, _rescue_dropped, self._asked, os.getpid())
            self._dropped.atexit = False  # the exit function comes earlier, while listeners still take events

    def release(self) -> None:
        """Stop watching the object: everything is saved."""
        if self._dropped is not None:
            self._dropped.detach()


def _rescue(reference: weakref.ref[AskedState], owner: int) -> None:
    """Save the state that is left when the process ends by Ctrl-C, SIGTERM or an error."""
    asked = reference()
    if asked is not None and os.getpid() == owner:
        asked.rescue()


def _rescue_dropped(asked: AskedState, owner: int) -> None:
    """Save the state that is left when its loop is freed; called by the garbage collector, in any thread."""
    if os.getpid() != owner:  # a worker that was forked
        return
    if threading.current_thread() is threading.main_thread():
        asked.rescue()
    else:  # it may be the thread that writes a checkpoint, which must not wait for itself
        threading.Thread(target=asked.rescue, name="saving a run that was dropped").start()
