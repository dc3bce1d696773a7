"""The work of a rank at one moment, as far as its status block, its backends and its stacks show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from unisono.launch.hang.stacks import Frame, Thread
from unisono.launch.hang.status_block import RecordedCall

__all__ = ["Pending", "Situation", "user_line_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """An operation that a backend has not finished."""

    group: str
    sequence: int
    """As counted by the backend, which differs from the count in the status block."""
    name: str
    tensors: str
    point_to_point: bool
    since_ns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The state of one rank at one moment, as far as it is known."""

    rank: int
    pid: int = 0
    state: Literal["running", "sleeping", "in the kernel", "stopped", "ended"] = "running"
    exit_code: int | None = None
    """None while it runs."""
    load: float | None = None
    """The number of cores that it has kept busy recently."""
    calls: tuple[RecordedCall, ...] = ()
    """Its latest calls, the newest last."""
    pending: tuple[Pending, ...] = ()
    """The operations that the backends have not finished, the oldest first."""
    enqueued: Mapping[str, int] = field(default_factory=dict)
    """By group, the number of the latest operation given to the backend; empty if it is not known."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By name, the members of groups."""
    main_thread: int = 0
    threads: tuple[Thread, ...] = ()
    """Its stacks; empty if it was not asked or could not answer."""
    children: tuple[tuple[int, str, tuple[Thread, ...]], ...] = ()
    """Python processes that it has forked: id, name and stacks."""

    @property
    def ended(self) -> bool:
        """True if the process has ended."""
        return self.exit_code is not None or self.state == "ended"

    @property
    def can_wait(self) -> bool:
        """True if it can go on when others come; one that is stopped is waited for, also in a wait of its own."""
        return not self.ended and self.state != "stopped"

    @property
    def main(self) -> Thread | None:
        """The stack of the main thread, or the last one if it cannot be identified."""
        return next((thread for thread in self.threads if thread.ident == self.main_thread), None) or (
            self.threads[-1] if self.threads else None
        )

    @property
    def place(self) -> Frame | None:
        """Where the user's program is: according to the stack, otherwise to the latest call."""
        if (main := self.main) and main.place:
            return main.place
        return user_line_of(self.calls[-1]) if self.calls and self.calls[-1].file else None

    @property
    def epoch(self) -> int:
        """How often it has made the default group."""
        return max((call.epoch for call in self.calls), default=0)


def user_line_of(call: RecordedCall) -> Frame | None:
    """Return the line of user code that made a call; None if it is not known."""
    if not call.file:
        return None
    return Frame(file=call.file, line=call.line, function=call.function, is_library=False)
