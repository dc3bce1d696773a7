"""Progress events of rank 0 on their way to the display.

Rank 0 writes them as JSON lines into a pipe (docs/events.md). The display is loaded with the first event: a
program that sends none pays nothing. Start reading at `EventRelay`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from unisono.watch.display import Progress

__all__ = ["EventRelay"]

_LONGEST = 1 << 24
"""Bytes of an event. More without a line end is no event, and must not fill the memory."""


class EventRelay:
    """Turns the bytes of the pipe into what the display shows.

    Args: stream is where the display draws; complain is called with one sentence if a line is no event.
    """

    def __init__(self, stream: TextIO, *, complain: Callable[[str], None]) -> None:
        self._stream = stream
        self._complain = complain
        self._complained = False
        self._rest = bytearray()
        self.display: Progress | None = None
        """The display, once there was an event."""
        self.step: int | None = None
        """Steps of the run that are done, if rank 0 has told."""
        self.steps: int | None = None
        """Steps of the run at its end, if that is known."""
        self.loss: float | str | None = None
        """The loss of the latest step; "nan" and the like are texts."""
        self._epoch: dict[str, Any] = {}

    def feed(self, data: bytes) -> None:
        """Show the events that these bytes complete."""
        *complete, rest = data.split(b"\n")
        for piece in complete:
            self._rest += piece
            self._take(bytes(self._rest))
            self._rest.clear()
        self._rest += rest
        if len(self._rest) > _LONGEST:
            self._rest.clear()

    def restart(self) -> None:
        """Forget what is left of an event that was not written to its end: another process goes on."""
        self._rest.clear()

    def close(self) -> None:
        """Take the display off the terminal."""
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
            self._open().handle(event)
        elif not self._complained:
            self._complained = True
            shown = line[:80].decode(errors="replace")
            self._complain(f"rank 0 wrote a progress event that is not a JSON object: {shown!r}; ignored")

    def _note(self, event: dict[str, Any]) -> None:
        """Keep what `unisono ps` shows."""
        if event.get("event") == "epoch":
            self._epoch = event
        step: Any = event.get("total_steps")
        if isinstance(step, int):
            self.step = step
        if event.get("event") == "step":
            self.loss = event.get("loss")
            epochs: Any = self._epoch.get("epochs")
            steps: Any = self._epoch.get("steps")
            epoch: Any = event.get("epoch")
            done: Any = event.get("step")
            if all(isinstance(number, int) for number in (epochs, steps, epoch, done, step)):
                self.steps = step + (epochs - epoch) * steps - done - 1

    def _open(self) -> Progress:
        if self.display is None:
            from unisono.watch.display import Progress  # noqa: PLC0415  only a program with events pays for it

            self.display = Progress(self._stream)
        return self.display
