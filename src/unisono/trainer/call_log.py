"""The calls of a Trainer that a new rank would make again, with their results.

A new rank runs the script from its top. It goes through what is outside of epochs, then through the epoch under way,
from the place where the loop last asked for a batch: as after a resume. The calls that the other ranks have made there
are not made again; they return what they returned then. Pure; start reading at `CallLog`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["CallLog", "Dropped", "LoggedCall"]


class Dropped:
    """The place of a result that is not kept."""


class LoggedCall(NamedTuple):
    """A call that has ended."""

    name: str
    """The call, such as "trainer.step"."""
    result: Any
    """The value that it has returned; a `Dropped` if that is not kept."""
    is_recent: bool = False
    """True if the loop has not asked for another batch or epoch since then."""
    has_failed: bool = False
    """True if it has raised an exception, which the script has caught."""


class CallLog:
    """The calls of one rank.

    >>> log = CallLog()
    >>> log.add("trainer.evaluate", 0.5)
    >>> log.begin_epoch()
    >>> log.add("trainer.batches", None)
    >>> log.ask()
    >>> log.add("trainer.step", 0.25)
    >>> [(call.name, call.is_recent) for call in log.calls()]
    [('trainer.evaluate', False), ('trainer.batches', False), ('trainer.step', True)]
    >>> log.ask()
    >>> [call.name for call in log.calls()]
    ['trainer.evaluate', 'trainer.batches']
    >>> log.leave_epochs()
    >>> log.count, [call.name for call in log.calls()], log.last
    (3, ['trainer.evaluate'], LoggedCall(name='trainer.step', result=0.25, is_recent=False, has_failed=False))
    """

    def __init__(self) -> None:
        self.count = 0
        """The number of calls that have returned, since the start of the run."""
        self.last: LoggedCall | None = None
        """The latest of them."""
        self._outside: list[LoggedCall] = []
        self._epoch: list[LoggedCall] = []
        self._asked: list[LoggedCall] = []
        self._current = self._outside

    def add(self, name: str, result: Any) -> None:
        """Add a call that has returned."""
        self.count += 1
        self.last = LoggedCall(name, result)
        self._current.append(self.last)

    def add_failed(self, name: str) -> None:
        """Add a call that has raised an exception, which has changed nothing and is not counted."""
        self._current.append(LoggedCall(name, None, has_failed=True))

    def begin_epoch(self) -> None:
        """Note that the body of an epoch begins."""
        self._asked = []
        self._epoch = self._current = []

    def ask(self) -> None:
        """Note that the loop asks for a batch."""
        if self._current is not self._outside:
            self._asked = self._current = []

    def leave_epochs(self) -> None:
        """Note that the loop over epochs has ended."""
        self._epoch, self._asked = [], []
        self._current = self._outside

    @property
    def is_outside(self) -> bool:
        """True outside of the body of an epoch."""
        return self._current is self._outside

    def calls(self) -> list[LoggedCall]:
        """Return the calls that a new rank comes to, in order."""
        older = self._outside if self._current is not self._outside else []
        if self._current is self._asked:
            older = [*older, *self._epoch]
        return [*older, *(call._replace(is_recent=not self.is_outside) for call in self._current)]
