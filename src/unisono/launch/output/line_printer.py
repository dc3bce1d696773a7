"""Final lines of ranks on their way to the launcher's streams, and the lines below them at the bottom of a terminal.

Lines wait for equal ones of other ranks (`line_merging.py`) and get their prefixes (`streams.py`). Lines that are not
final are drawn below them (`live.py`), unless the display has the terminal. Start reading at `LinePrinter.add`.
"""

from __future__ import annotations

import selectors
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import groupby
from operator import attrgetter
from typing import TextIO

from unisono.launch.output.event_relay import EventRelay
from unisono.launch.output.line_merging import LineMerger, MergedLine
from unisono.launch.output.live import LiveArea, LiveLines
from unisono.launch.output.streams import LauncherStream, Prefixes, Sink, open_streams

__all__ = ["LinePrinter"]

_REDRAW_S = 0.05
"""How long a change of a live line waits: most partial lines are complete by then."""
_MOST_LIVE = 8


class LinePrinter:
    """Prints the lines of all ranks, and the launcher's own.

    Args:
        stdout: The launcher's standard output.
        stderr: The launcher's standard error.
        environment: The environment, which may forbid colours, or name a terminal that cannot be drawn on.
        template: The template of prefixes; None for the usual ones.
        role: The role of the ranks, for prefixes.
        number_of: Returns the number of a rank on this machine, for prefixes.
        events: Has the display, above which everything is printed while there is one.
        live: Returns the lines to draw at the bottom of a terminal, with their prefixes.
    """

    def __init__(
        self,
        stdout: TextIO,
        stderr: TextIO,
        environment: Mapping[str, str],
        *,
        template: str | None,
        role: str,
        number_of: Callable[[int], int],
        events: EventRelay,
        live: Callable[[], list[bytes]],
    ) -> None:
        def make_prefixes(colour: bool) -> Prefixes:
            return Prefixes(colour=colour, template=template, role=role, number_of=number_of)

        self.streams = self._stdout, self._stderr = open_streams(stdout, stderr, environment, make_prefixes)
        """Standard output and standard error."""
        self._events, self._live = events, live
        self._merger = LineMerger()
        self._writing: set[Sink] = set()
        self._area = LiveArea()
        self._notice = b""
        can_draw = environment.get("TERM") not in ("dumb", "unknown")
        self._foot = next((s for s in (self._stderr, self._stdout) if s.terminal and can_draw), None)
        self._redraw_s: float | None = None

    @property
    def broken(self) -> bool:
        """True if the reader of standard output is gone."""
        return self._stdout.sink.broken

    @property
    def full(self) -> bool:
        """True if a stream is so far behind that ranks should wait."""
        return any(stream.sink.full for stream in self.streams)

    @property
    def deadline_s(self) -> float | None:
        """When `tick` has something to do, by the monotonic clock; None if nothing is held back."""
        candidates = [self._merger.deadline_s, self._redraw_s]
        return min((deadline_s for deadline_s in candidates if deadline_s is not None), default=None)

    def forget_prefixes(self) -> None:
        """Make prefixes anew, as ranks have other numbers."""
        for stream in self.streams:
            stream.prefixes.forget()

    def expect(self, ranks: Collection[int]) -> None:
        """Hold lines back only for these ranks, which may still print."""
        self._print(self._merger.expect(ranks))

    def add(self, rank: int, stream: int, lines: Iterable[bytes], now_s: float) -> None:
        """Print a rank's next lines, after they have waited for equal ones of other ranks.

        Args:
            stream: The number of the stream.
            now_s: The monotonic clock.
        """
        self._print(self._merger.add(rank, stream, lines, now_s))

    def release(self, rank: int) -> None:
        """Print the lines up to this rank's last one at once."""
        self._print(self._merger.release(rank))

    def show(self, text: str) -> None:
        """Print lines of the launcher's own on standard error, as they are, below all that has been printed."""
        self._print(self._merger.flush())
        self._write(self._stderr, f"{text.rstrip()}\n".encode(errors="backslashreplace"))

    def notice(self, text: str) -> None:
        """Display a line of the launcher's own at the bottom of a terminal, until the next notice; "" removes it."""
        self._notice = text.encode(errors="backslashreplace")
        if self._foot is not None:
            self._foot.sink.write(self._area.erase() + self._draw())
            self._foot.sink.flush()

    def remove_notice(self) -> None:
        """Remove the notice, if there is one."""
        if self._notice:
            self.notice("")

    def draws(self, stream: LauncherStream) -> bool:
        """Return True if lines of the stream that are not final stand at the bottom of a terminal."""
        return self._foot is not None and self._events.display is None and stream.sink is self._foot.sink

    def change(self, lines: LiveLines, now_s: float) -> None:
        """Draw the bottom of the terminal anew in a moment: these of its lines have changed."""
        if self._redraw_s is None and (self._area.rows or lines.live):
            self._redraw_s = now_s + _REDRAW_S

    def make_room(self) -> None:
        """Leave the bottom of the terminal to the display, which may open now."""
        if self._foot is not None and self._area.rows:
            self._foot.sink.write(self._area.erase())
            self._foot.sink.flush()

    def tick(self, now_s: float) -> None:
        """Print and draw what has been held back long enough."""
        self._print(self._merger.due(now_s))
        if self._redraw_s is not None and self._redraw_s <= now_s:
            self._redraw(now_s)

    def balance(self, selector: selectors.BaseSelector) -> None:
        """Watch streams that accept no more, and no others.

        Args:
            selector: The agent's; the data of each key is the function to call when the file is ready.
        """
        for sink in {stream.sink for stream in self.streams}:
            if sink.waiting != (sink in self._writing):
                if sink.waiting:
                    self._writing.add(sink)
                    selector.register(sink, selectors.EVENT_WRITE, sink.pump)
                else:
                    self._writing.remove(sink)
                    selector.unregister(sink)

    def finish(self) -> None:
        """Print all lines that are held back, and remove those at the bottom of the terminal."""
        self._print(self._merger.flush())
        if self._foot is not None:
            self._foot.sink.write(self._area.erase())

    def flush(self) -> None:
        """Write all that is left to the streams, however long that takes."""
        for stream in self.streams:
            stream.sink.flush()

    def _print(self, lines: Iterable[MergedLine]) -> None:
        for number, group in groupby(lines, key=attrgetter("stream")):
            stream = self.streams[number]
            self._write(stream, b"".join(stream.prefixes.of(merged.ranks) + merged.line + b"\n" for merged in group))

    def _write(self, stream: LauncherStream, data: bytes) -> None:
        display = self._events.display
        if display is not None and stream.terminal and self._stderr.terminal:
            stream.sink.flush()
            display.print(data.decode(errors="replace"))
        elif self._foot is not None and stream.sink is self._foot.sink and self._area.rows:
            stream.sink.write(self._area.erase() + data + self._draw())
        else:
            stream.sink.write(data)

    def _redraw(self, now_s: float) -> None:
        if self._foot is None:
            return
        if self._foot.sink.waiting:  # a terminal that accepts no more: draw when it does
            self._redraw_s = now_s + _REDRAW_S
        else:
            self._redraw_s = None
            self._foot.sink.write(self._area.erase() + self._draw())

    def _draw(self) -> bytes:
        assert self._foot is not None
        lines = self._live()
        if self._notice:
            lines.append(self._notice)
        return self._area.draw(lines[-_MOST_LIVE:], columns=self._foot.sink.columns) if lines else b""
