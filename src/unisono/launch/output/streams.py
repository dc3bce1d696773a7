"""The launcher's own streams: the prefixes of ranks' lines, and writing without blocking.

`Prefixes` is pure. `Sink` writes to a stream of the launcher only what it accepts at once, so a reader
that has stopped (a pager, a terminal after Ctrl-S) cannot keep the launcher from seeing a signal or a lost rank.
"""

from __future__ import annotations

import os
import select
import socket
import stat
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from string import Template
from typing import TextIO

from unisono.text import format_ranks

__all__ = ["LauncherStream", "Prefixes", "Sink", "open_streams", "wants_colour"]

_COLOURS = (36, 33, 35, 32, 34, 31)
_BOLD = 1

_MOST_PREFIXES = 1000
"""The number of sets of ranks whose prefixes are cached."""


class Prefixes:
    """The prefixes of lines: the ranks that printed one, in colour if `colour` is True.

    >>> Prefixes(colour=False).of({3}), Prefixes(colour=False).of({0, 1, 2})
    (b'[3] ', b'[0-2] ')
    >>> template = "${role_name}/${local_rank} of ${rank}: "
    >>> Prefixes(colour=False, template=template, role="actor", number_of=lambda rank: rank - 4).of({4, 5})
    b'actor/0-1 of 4-5: '

    Args:
        colour: True to colour them.
        template: The text, in which ${rank}, ${local_rank}, ${role_name} and ${hostname} stand for what is filled in.
            None: "[${rank}] ", of which the last character is not coloured.
        role: The role of the ranks.
        number_of: Returns the number of a rank on this machine.
    """

    def __init__(
        self,
        *,
        colour: bool,
        template: str | None = None,
        role: str = "default",
        number_of: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self._colour, self._number_of = colour, number_of
        self._template = None if template is None else Template(template)
        self._facts = {"role_name": role, "hostname": socket.gethostname()}
        self._known: dict[Hashable, bytes] = {}

    def forget(self) -> None:
        """Make prefixes anew, as ranks have other numbers."""
        self._known.clear()

    def of(self, ranks: Collection[int]) -> bytes:
        """Return the prefix for a line of these ranks."""
        key = frozenset(ranks)
        prefix = self._known.get(key)
        if prefix is None:
            if len(self._known) > _MOST_PREFIXES:
                self._known.clear()
            prefix = self._known[key] = self._make(ranks)
        return prefix

    def _make(self, ranks: Collection[int]) -> bytes:
        text, end = f"[{format_ranks(ranks, separator=',')}]", " "
        if self._template is not None:
            numbers = [self._number_of(rank) for rank in ranks]
            shown = {
                name: format_ranks(found, separator=",") for name, found in (("rank", ranks), ("local_rank", numbers))
            }
            text, end = self._template.safe_substitute(self._facts, **shown), ""
        if not self._colour:
            return (text + end).encode()
        colour = _COLOURS[min(ranks) % len(_COLOURS)] if len(ranks) == 1 else _BOLD
        return f"\x1b[{colour}m{text}\x1b[0m{end}".encode()


class Sink:
    """One of the launcher's own streams. Buffers bytes that the stream does not accept yet."""

    def __init__(self, file: int, *, high_water: int = 1 << 20) -> None:
        self._file = file
        self._pending = bytearray()
        self._high_water = high_water
        self._poll = select.poll()
        self._poll.register(file, select.POLLOUT)
        # A pipe that polls as writable accepts PIPE_BUF bytes without blocking, and a terminal about as much.
        self._piece = 1 << 20 if stat.S_ISREG(os.fstat(file).st_mode) else select.PIPE_BUF
        self.broken = False
        """True if the reader of the stream is gone. All output is dropped from then on."""

    def fileno(self) -> int:
        """Return the file number of the stream, for a selector."""
        return self._file

    @property
    def waiting(self) -> bool:
        """True if bytes are left to be written when the stream accepts more."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """True if so much is left that ranks should wait until it is written."""
        return len(self._pending) > self._high_water

    @property
    def columns(self) -> int:
        """The width of the stream's terminal; 80 if it is not known."""
        try:
            return os.get_terminal_size(self._file).columns or 80
        except OSError:
            return 80

    def write(self, data: bytes) -> None:
        """Write what the stream accepts now and keep the rest."""
        if not self.broken:
            self._pending += data
            self.pump()

    def pump(self) -> None:
        """Write more of the rest, while the stream accepts it."""
        while self._pending and self._poll.poll(0):
            self._write_piece()

    def flush(self) -> None:
        """Write all that is left, however long that takes."""
        while self._pending:
            self._write_piece()

    def _write_piece(self) -> None:
        # Cut between lines where possible: the other stream may be the same terminal and write in between.
        cut = self._pending.rfind(b"\n", 0, self._piece) + 1 or self._piece
        try:
            del self._pending[: os.write(self._file, self._pending[:cut])]
        except OSError:  # no reader, a full disk, a terminal that hung up: there is nowhere to report it
            self.broken = True
            self._pending.clear()


def wants_colour(environment: Mapping[str, str], *, terminal: bool) -> bool:
    """Decide whether prefixes are coloured: on a terminal, unless it is dumb or NO_COLOR is set (no-color.org).

    >>> wants_colour({"TERM": "xterm"}, terminal=True), wants_colour({"NO_COLOR": "1"}, terminal=True)
    (True, False)
    """
    return terminal and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


@dataclass(eq=False, slots=True)
class LauncherStream:
    """Standard output or standard error of the launcher, as lines of ranks are written to it."""

    number: int
    sink: Sink
    terminal: bool
    prefixes: Prefixes


def open_streams(
    stdout: TextIO, stderr: TextIO, environment: Mapping[str, str], make_prefixes: Callable[[bool], Prefixes]
) -> tuple[LauncherStream, LauncherStream]:
    """Return standard output and standard error, which share a sink if they are one terminal.

    Args:
        stdout: Standard output.
        stderr: Standard error.
        environment: The environment, which may forbid colours.
        make_prefixes: Returns the prefixes of a stream; True if they are coloured.
    """
    streams, sinks = [], [Sink(stdout.fileno())]
    terminals = [stream.isatty() for stream in (stdout, stderr)]
    # On one terminal, order and the lines at its bottom need one writer.
    devices = [os.fstat(stream.fileno()).st_rdev for stream in (stdout, stderr)]
    sinks.append(sinks[0] if all(terminals) and devices[0] == devices[1] else Sink(stderr.fileno()))
    for number, (sink, terminal) in enumerate(zip(sinks, terminals, strict=True)):
        prefixes = make_prefixes(wants_colour(environment, terminal=terminal))
        streams.append(LauncherStream(number, sink, terminal, prefixes))
    return streams[0], streams[1]
