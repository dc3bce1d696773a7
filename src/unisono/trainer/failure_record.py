"""The event that tells why a run has no end: the exception or the signal that ended its program.

A loop cannot see the exception that leaves it: its generator is closed as by `break`, and the exception may be caught.
So the event is emitted when the program ends, or when the run is freed while it ends, if the loop has not. A loop left
by `break` has not failed, whatever the program does then. Start reading at `FailureRecord.tell`.
"""

from __future__ import annotations

import atexit
import inspect
import os
import sys
import weakref
from types import CodeType, FrameType

from unisono.program_end import ending
from unisono.trainer.trainer_parts import TrainerParts
from unisono.watch import EventLog

__all__ = ["FailureRecord"]


class FailureRecord:
    """Knows whether a loop of one run is under way, and tells of the exception that has left it.

    Args:
        log: Gets the event, at most one for each loop.
        parts: The parts of the run.
        keeps: True if the run has a directory: only then is it told.
    """

    def __init__(self, log: EventLog, parts: TrainerParts, *, keeps: bool) -> None:
        self._log, self._cursor, self._decisions = log, parts.cursor, parts.recovery.decisions
        self._tells = keeps and parts.run.world.rank == 0
        self._dropped: weakref.finalize[[FailureRecord, int], object] | None = None
        self._is_open = False
        self._left_at: tuple[CodeType, int] | None = None
        """The code and the line at which the loop was left."""
        self._before = ending()
        # Registered after the log's listeners have got their first event, so that it is called before they close.
        if self._tells:
            atexit.register(_tell_of, weakref.ref(self), os.getpid())

    def begin(self, owner: object) -> None:
        """Note that a loop has begun.

        Args:
            owner: A failure is also told when it is freed while the program ends, as in a function that raises. What is
                called then keeps the log alive until the loop has ended.
        """
        if not self._tells:
            return
        self._is_open, self._left_at = True, None
        self._before = ending()  # in a notebook, that of an earlier cell
        if self._dropped is None:
            self._dropped = weakref.finalize(owner, _tell, self, os.getpid())
            self._dropped.atexit = False

    def end(self) -> None:
        """Note that the loop has ended as it should."""
        self._is_open = False
        if self._dropped is not None:
            self._dropped.detach()
            self._dropped = None

    def leave(self, frame: FrameType | None) -> None:
        """Note that a loop is left, by `break`, an exception, or since nothing refers to it any more.

        Args:
            frame: The frame of the loop's generator, which is called by what closes it.
        """
        if not self._tells or ending() != self._before:
            return  # the program has ended already, and this is its end
        while frame is not None and frame.f_code.co_flags & inspect.CO_GENERATOR:
            frame = frame.f_back  # also through a progress bar around the loop
        if frame is not None and self._left_at is None:
            self._left_at = frame.f_code, frame.f_lineno

    def tell(self) -> None:
        """Emit the event, if the program ends by an exception that has left the loop, or by a signal."""
        end = ending()
        if not self._is_open or end is None or end == self._before:
            return
        self._is_open = False
        if self._left_at is None or self._left_at in end.places:
            message = end.message
            if end.kind == "SIGTERM" and self._decisions.has_failed:
                message = "another rank has failed; the output of the run shows how"
            self._log.emit("failure", type=end.kind, message=message, total_steps=self._cursor.total_steps)


def _tell_of(reference: weakref.ref[FailureRecord], owner: int) -> None:
    record = reference()
    if record is not None:
        _tell(record, owner)


def _tell(record: FailureRecord, owner: int) -> None:
    if os.getpid() == owner and not sys.is_finalizing():  # not in a worker that was forked
        record.tell()
