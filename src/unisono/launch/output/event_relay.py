"""Progress events of rank 0 on their way to the display.

Rank 0 writes them as JSON lines into a pipe (docs/events.md). The display is imported with the first event, so
programs without events do not pay for it. Start reading at `EventRelay`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from unisono.watch.display import Progress

__all__ = ["EventRelay"]

_LONGEST = 1 << 24
"""The most bytes of an event. More bytes without a line end are not an event, and must not fill the memory."""


class EventRelay:
    """Reads events from the bytes of the pipe, and displays them.

    Args:
        stream: Where the display draws.
        complain: Called with one sentence at the first line that is not an event.
    """

    def __init__(self, stream: TextIO, *, complain: Callable[[str], None]) -> None:
        self._stream = stream
        self._complain = complain
        self._complained = False
        self._rest = bytearray()
        self.display: Progress | None = None
        """The display, from the first event until `close`."""
        self.step: int | None = None
        """The number of completed steps of the run, if rank 0 has reported it."""
        self.steps: int | None = None
        """The number of steps at the end of the run, if it is known."""
        self.loss: float | str | None = None
        """The loss of the latest step; "nan" and the like are strings."""
        self.lr: float | None = None
        """The learning rate of the latest step."""
        self.samples: int | None = None
        """The number of samples in the latest step."""
        self.times: dict[str, Any] | None = None
        """The latest event "times" of this run, which has where the time of its steps goes on each rank."""
        self.tables: dict[str, Any] | None = None
        """The entry of each embedding table in the latest event "tables"."""
        self.listener: Callable[[dict[str, Any]], None] | None = None
        """Called with each event."""

    def feed(self, data: bytes) -> None:
        """Display the events that these bytes complete."""
        *complete, rest = data.split(b"\n")
        for piece in complete:
            self._rest += piece
            self._take(bytes(self._rest))
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > _LONGEST:
            self._rest.clear()

    def restart(self) -> None:
        """Discard an event that was not written completely: another process writes next."""
        self._rest.clear()

    def close(self) -> None:
        """Remove the display from the terminal."""
        if self.display is not None:
            self.display.close()
            self.display = None

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if isinstance(event, dict):
            self._note(event)
            if self.listener is not None:
                self.listener(event)
            self._open().handle(event)
        elif not self._complained:
            self._complained = True
            shown = line[:80].decode(errors="replace")
            self._complain(f"rank 0 wrote a progress event that is not a JSON object: {shown!r}; ignored")

    def _note(self, event: dict[str, Any]) -> None:
        """Update the numbers that `unisono ps` and `unisono top` show."""
        if event.get("event") == "epoch":
            whole: Any = event.get("run_steps")
            self.steps = whole if isinstance(whole, int) else None
        elif event.get("event") == "times":
            self.times = event
        elif event.get("event") == "tables":
            tables: Any = event.get("tables")
            self.tables = tables if isinstance(tables, dict) else None
        elif event.get("event") in ("run", "recovery", "resize"):
            self.times = None
        step: Any = event.get("total_steps")
        if isinstance(step, int):
            self.step = step
        if event.get("event") == "step":
            self.loss, self.lr, self.samples = event.get("loss"), event.get("lr"), event.get("samples")

    def _open(self) -> Progress:
        if self.display is None:
            from unisono.watch.display import Progress  # noqa: PLC0415  only a program with events pays for it

            self.display = Progress(self._stream)
        return self.display
