"""The renderer for terminals: finished epochs as a table, the running one as its last row with a bar.

Events redraw the live row, at most seven times a second: no refresh thread takes time from ranks or is half-way through
a line when a worker process is forked. The row has the columns of the rows above it, so nothing moves when it becomes
one of them. Columns that do not fit the width are left out, the least important first.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from unisono.watch.figures import format_clock, format_elapsed, format_rate
from unisono.watch.renderer import EpochView, RunningSum

__all__ = ["TerminalRenderer"]

_REDRAW_S = 0.15
_SAVED_S = 2.0
_WINDOW = 40
"""Number of redraws over which the live rate is computed: 6 s of short steps."""
_BAR_WIDEST, _BAR_NARROWEST = 30, 6
_ECHO = 3
"""Room for the ^C that a terminal echoes: if it wrapped to the next line, the row would stay on the screen."""
_SHORT_RATE, _TIME = len("    1,000/s"), len("  0:00:00")


class _Redraw(NamedTuple):
    """The progress of an epoch at a redraw."""

    time_s: float
    items: float
    done: int
    losses: Mapping[str, RunningSum]
    values: Mapping[str, RunningSum]


class TerminalRenderer:
    """Draws on a terminal. While an epoch runs, prints of this process's own code appear above the live row, too."""

    def __init__(self, stream: TextIO, *, clock: Callable[[], float], lock: AbstractContextManager[Any]) -> None:
        self._stream = stream
        self._clock = clock
        self._lock = lock
        self._console = _Console(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        ascii_only = self._console.options.ascii_only
        self._separator = ", " if ascii_only else " · "
        self._bar_signs = ("=", "-", " ") if ascii_only else ("━", "╸", "━")
        self._live: Live | None = None
        self._above: list[tuple[str, _Above]] = []
        self._owner = os.getpid()
        self._drawn_s = -math.inf
        self._saved = ""
        self._saved_s = -math.inf
        self._tail_width = len("0:00:00 left")
        self._number: int | None = None
        self._window: deque[_Redraw] = deque(maxlen=_WINDOW)
        self._indent = 0
        self._value_widths: dict[str, int] = {}
        """The widest text of each further value: a column stays where it is."""
        self._values_width = 0

    def header(self, parts: Sequence[str]) -> None:
        """Write the figures of the run, with line breaks between them if the terminal is narrow."""
        self._value_widths, self._values_width = {}, 0
        self._fill(Text("unisono  ", "bold"), parts, self._separator)

    def remark(self, text: str) -> None:
        """Write the line dimmed."""
        self._keep(Text(text, "dim"))

    def warning(self, text: str) -> None:
        """Write the line, marked as a warning."""
        self._keep(Text.assemble(("warning: ", "yellow"), text))

    def saved(self, text: str) -> None:
        """Display the text in the live row for two seconds."""
        self._saved, self._saved_s = text, self._clock()

    def moved(self, epoch: EpochView) -> None:
        """Redraw the live row, unless it was drawn less than 0.15 s ago."""
        now_s = self._clock()
        if now_s - self._drawn_s < _REDRAW_S:
            return
        self._drawn_s = now_s
        if epoch.number != self._number:
            self._number = epoch.number
            self._window.clear()
        self._window.append(_Redraw(epoch.latest_s, epoch.items, epoch.done, epoch.losses, epoch.values))
        self._show(self._row(epoch, now_s))

    def stood(self, epoch: EpochView) -> None:
        """Write the row of the epoch without a bar."""
        self._indent = len(epoch.label) + 2
        steps, loss, rate, short_rate = _columns(epoch, epoch.loss_text(), epoch.rate)
        time = Text(f"  {format_elapsed(epoch.elapsed_s):>7}", "dim")
        head = Text.assemble(epoch.label, steps, loss)
        if epoch.values:
            head.append_text(self._values(epoch.value_texts(), head.cell_len))
        choices = [Text.assemble(head, *tail) for tail in ((rate, time), (short_rate, time), (time,), ())]
        width = self._console.width
        row = next((row for row in choices if row.cell_len <= width), choices[-1])
        with self._console:  # one write, so that the row is never seen twice
            self.rest()
            self._keep(Text.assemble(row, *_fitting(epoch.figures(), width - row.cell_len)))

    def evaluated(self, label: str, metrics: Sequence[str]) -> None:
        """Write the metrics under the row of their epoch."""
        self._fill(Text(" " * (self._indent or len(label) + 2)), metrics, "  ")

    def rest(self) -> None:
        """Clear the live row."""
        self._drawn_s = -math.inf
        if self._live is not None:
            self._show(Text(""))

    def write(self, text: str) -> None:
        """Write the text above the live row, without interpreting it."""
        # As a segment, rich writes it unchanged: no markup, no highlighting, no wrapping, with its own colours.
        self._console.print(Segments([Segment(text), Segment.line()]), soft_wrap=True)

    def close(self) -> None:
        """Erase the live row, show the cursor, and restore the standard streams."""
        live, self._live = self._live, None
        # A forked child inherits this object and its exit handlers, but the terminal belongs to its parent.
        if live is None or os.getpid() != self._owner:
            return
        atexit.unregister(self.close)
        for name, above in self._above:
            if getattr(sys, name) is above:
                setattr(sys, name, above.stream)
        live.stop()
        for _, above in self._above:
            above.end()
        self._above = []

    def _show(self, row: Text) -> None:
        if self._live is None:
            # The exit handler is for scripts that end by Ctrl-C or an error without closing: it shows the cursor again.
            atexit.register(self.close)
            self._live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
            self._redirect()
        self._live.update(row, refresh=True)

    def _redirect(self) -> None:
        # rich would redirect `train.py > out.txt` to the terminal too; only output to a terminal may be moved.
        if self._stream.isatty():
            for name in ("stdout", "stderr"):
                stream = getattr(sys, name)
                if stream is not None and stream.isatty():
                    above = _Above(stream, self.write, self._lock)
                    self._above.append((name, above))
                    setattr(sys, name, above)

    def _keep(self, row: Text) -> None:
        self._console.print(row, soft_wrap=True)

    def _fill(self, head: Text, parts: Sequence[str], separator: str) -> None:
        """Write the parts, with line breaks between them if the terminal is narrow."""
        row, width = head, self._console.width
        indent = " " * head.cell_len
        empty = True
        for part in parts:
            if not empty and row.cell_len + len(separator) + cell_len(part) > width:
                self._keep(row)
                row, empty = Text(indent), True
            row = Text.assemble(row, *(() if empty else ((separator, "dim"),)), part)
            empty = False
        self._keep(row)

    def _row(self, epoch: EpochView, now_s: float) -> Text:
        mark = self._window[0]
        rate, left_s = self._pace(epoch, mark)
        steps, loss, long_rate, short_rate = _columns(epoch, epoch.loss_text(mark.losses), rate)
        tail = "" if left_s is None else f"{format_clock(math.ceil(left_s))} left"
        if epoch.steps is None:
            tail = format_clock(epoch.elapsed_s)
        note = self._saved if now_s - self._saved_s < _SAVED_S else ""
        width = self._console.width - _ECHO
        head = Text.assemble(epoch.label, steps, loss)
        if head.cell_len > width:
            head = Text.assemble(epoch.label, steps)
        if epoch.values:
            head.append_text(self._values(epoch.value_texts(mark.values), head.cell_len))
        elif epoch.number >= 0 and not epoch.losses and head.cell_len + self._values_width <= width:
            head.append(" " * self._values_width)  # of the rows above
        self._tail_width = max(self._tail_width, len(tail))
        timed = Text(f"  {tail:<{self._tail_width}}", "dim")
        room = 0
        row = head
        for extras in ((long_rate, timed), (short_rate, timed), (long_rate,), (short_rate,), ()):
            row = Text.assemble(head, *extras)
            room = width - row.cell_len - 2
            if room >= (_BAR_NARROWEST if epoch.steps else -2):
                break
        # A note replaces the bar if there is no room for both.
        bar = min(room - (len(note) + 2 if note else 0), _BAR_WIDEST)
        if epoch.steps and bar >= _BAR_NARROWEST:
            row = Text.assemble(row, "  ", *self._bar(epoch.done / epoch.steps, bar))
        room = width - row.cell_len
        row = Text.assemble(row, *_fitting([note] if note else epoch.figures(), room))
        row.truncate(max(1, width), overflow="crop")
        return row

    def _values(self, texts: Sequence[tuple[str, str]], used: int) -> Text:
        """Return columns of the first values that fit, and how many do not.

        They are the same in the live row and in those above it: there is room for a short rate and a time or a short
        bar behind them.
        """
        room = self._console.width - _ECHO - used - _SHORT_RATE - _TIME
        columns = Text()
        for i, (label, text) in enumerate(texts):
            width = self._value_widths[label] = max(self._value_widths.get(label, 6), len(text))
            column = Text.assemble("  ", (f"{label} ", "dim"), f"{text:>{width}}")
            rest = len(texts) - i
            needed = columns.cell_len + column.cell_len
            if needed + (0 if rest == 1 else len(f"  +{rest - 1}")) > room:
                if i:
                    columns.append(f"  +{rest}", "dim")
                break
            columns.append_text(column)
        self._values_width = columns.cell_len
        return columns

    def _bar(self, fraction: float, width: int) -> list[tuple[str, str]]:
        whole, half, rest = self._bar_signs
        if self._console.no_color or self._console.color_system is None:
            rest = " "  # without colours, nothing else separates done from not done
        done, odd = divmod(min(2 * width, int(2 * width * fraction)), 2)
        return [(whole * done + half * odd, "cyan"), (rest * (width - done - odd), "bright_black")]

    def _pace(self, epoch: EpochView, mark: _Redraw) -> tuple[float | None, float | None]:
        """Return items per second and seconds left by the last redraws: the rate may change in a long epoch."""
        span_s = epoch.latest_s - mark.time_s
        if span_s <= 0 or epoch.done <= mark.done:
            return epoch.rate, epoch.remaining_s(epoch.step_s)
        return (epoch.items - mark.items) / span_s, epoch.remaining_s(span_s / (epoch.done - mark.done))


def _columns(epoch: EpochView, loss: str, rate: float | None) -> tuple[Text, Text, Text, Text]:
    """Return steps, loss, rate and short rate. Unknown values are blanks, so that no column moves later."""
    number = " " * 9 if rate is None else f"  {format_rate(rate):>7}"
    name, _, value = loss.partition(" ") if loss.startswith("loss ") else ("", "", loss)
    return (
        Text.assemble(f"  {epoch.steps_text()}", ("" if epoch.steps else f" {epoch.counted}", "dim")),
        Text.assemble("  ", (f"{name} " if name else "", "dim"), f"{value:>6}") if loss else Text(" " * 13),
        Text.assemble(number, (" " * (3 + len(epoch.unit)) if rate is None else f" {epoch.unit}/s", "dim")),
        Text.assemble(number, ("  " if rate is None else "/s", "dim")),
    )


def _fitting(parts: Sequence[str], room: int) -> list[tuple[str, str]]:
    """Return the first parts that fit, dimmed."""
    fitting = []
    for part in parts:
        room -= 2 + cell_len(part)
        if room < 0:
            break
        fitting.append((f"  {part}", "dim"))
    return fitting


class _Console(Console):
    """A console whose stream may be closed."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError again: rich would end the process, and with it the training."""
        raise  # noqa: PLE0704  rich calls this while it handles the BrokenPipeError


class _Above:
    """A standard stream of this process while a live row is on its terminal: whole lines are written above the row.

    An incomplete line is held back until its end, and of a line with carriage returns (a progress bar) only the last
    state is shown. A forked child, such as a worker of a DataLoader, writes to the stream itself.
    """

    def __init__(self, stream: TextIO, write: Callable[[str], None], lock: AbstractContextManager[Any]) -> None:
        self.stream = stream
        self._write = write
        self._lock = lock
        self._owner = os.getpid()
        self._rest = ""
        self._fresh = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        if os.getpid() != self._owner:
            fresh, self._fresh = self._fresh, text.endswith("\n")
            return self.stream.write("\r\x1b[2K" + text if fresh else text)  # over the row, not after it
        with self._lock:
            *lines, self._rest = (self._rest + text).split("\n")
            if lines:
                self._write("\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.stream.flush()

    def end(self) -> None:
        rest, self._rest = self._rest, ""
        if rest:
            self.stream.write(rest)
            self.stream.flush()
