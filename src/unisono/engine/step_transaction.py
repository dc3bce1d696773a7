"""What the parts of one step must know of each other: what is put off, what has been passed, and what is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import NewType

__all__ = ["Passed", "StepTransaction"]

Passed = NewType("Passed", int)
"""The number of a barrier that this rank has passed, after which it may read what others wrote before it."""


class StepTransaction:
    """The step of one optimizer that is under way; each optimizer has one of these, and steps one after the other.

    Attributes:
        writing: True while the state is of no step: while it is written, and after a failure that could not be undone.
        interrupted: True if Ctrl-C came while other ranks counted on this one to go on, so its exception is owed.
        passed: The barrier at which this rank has seen the gradients of all; only ranks of one host have one.
        deferred: What must be done before the step ends and before code runs that may draw random numbers. It is put
            off until this rank has to wait for others.
    """

    __slots__ = ("deferred", "interrupted", "passed", "writing")

    def __init__(self) -> None:
        self.writing = self.interrupted = False
        self.passed: Passed | None = None
        self.deferred: Callable[[], None] | None = None

    def run_deferred(self) -> None:
        """Do what was put off, if it has not been done."""
        if self.deferred is not None:
            self.deferred()
            self.deferred = None

    def raise_interrupt(self) -> None:
        """Raise KeyboardInterrupt if it is owed."""
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    def close(self) -> None:
        """End a step that all of the run's state accounts for.

        Raises:
            KeyboardInterrupt: If it came during the step, at a moment when this rank could not leave it.
        """
        self.writing = False
        if self.interrupted:
            self.raise_interrupt()
