"""State that the parts of one step share: deferred work, the barrier passed, and whether state is being written."""

from __future__ import annotations

from collections.abc import Callable
from typing import NewType

__all__ = ["STEP_UNDONE", "Passed", "StepTransaction"]

STEP_UNDONE = "The step did not happen: weights and buffers keep their values from before it."
"""The sentence in messages about a step that was discarded on all ranks."""

Passed = NewType("Passed", int)
"""The number of a barrier that this rank has passed. It may then read what the other ranks wrote before the barrier."""


class StepTransaction:
    """The current step of one optimizer. Each optimizer has one such object, for all of its steps.

    Attributes:
        writing: True while the state is that of no step: during writes, and after a failure that could not be undone.
        interrupted: True if Ctrl-C came while other ranks relied on this one to go on. KeyboardInterrupt is raised
            later.
        passed: The latest barrier after which this rank could read the gradients of all ranks, or their buffers or
            sparse gradients. Only the shared-memory engine sets it.
        deferred: Work that must be done before the step ends, and before code runs that may draw random numbers. It
            is deferred until this rank has to wait for others.
    """

    __slots__ = ("deferred", "interrupted", "passed", "writing")

    def __init__(self) -> None:
        self.writing = self.interrupted = False
        self.passed: Passed | None = None
        self.deferred: Callable[[], None] | None = None

    def run_deferred(self) -> None:
        """Run the deferred work, if it has not run yet."""
        if self.deferred is not None:
            self.deferred()
            self.deferred = None

    def raise_interrupt(self) -> None:
        """Raise KeyboardInterrupt if `interrupted` is set, and clear it."""
        if self.interrupted:
            self.interrupted = False
            raise KeyboardInterrupt

    def close(self) -> None:
        """End a step that all of the run's state accounts for.

        Raises:
            KeyboardInterrupt: If Ctrl-C came during the step, at a moment when this rank could not leave it.
        """
        self.writing = False
        if self.interrupted:
            self.raise_interrupt()
