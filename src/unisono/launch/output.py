"""What ranks print: whole lines, each with its rank in front, passed on without blocking.

`LineSplitter` and `Prefix` are pure. `Sink` writes to a stream of the launcher only what it takes at once, so a reader
that has stopped (a pager, a terminal after Ctrl-S) cannot keep the launcher from seeing a signal or a lost rank.
"""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterable, Mapping

__all__ = ["LineSplitter", "Prefix", "Sink", "wants_colour"]

_COLOURS = (36, 33, 35, 32, 34, 31)


class LineSplitter:
    """Cut a stream of bytes into lines, whatever the pieces in which it arrives.

    Of a line that was overwritten with carriage returns, as progress bars do, the last version remains. A line longer
    than `limit` bytes is given in parts, so that a stream without line ends cannot fill the memory.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\\r\\ntw"), splitter.feed(b"o\\n 10%\\r 20%"), splitter.finish()
    ([b'one'], [b'two'], [b' 20%'])
    """

    def __init__(self, *, limit: int = 1 << 24) -> None:
        self._rest = bytearray()
        self._limit = limit

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes and return the lines that they complete, without line ends."""
        *complete, rest = data.split(b"\n")
        lines = []
        for piece in complete:
            self._rest += piece
            lines.append(_last_version(self._rest))
            self._rest.clear()
        self._rest += rest
        # The last carriage return stays, because the line end of Windows may follow it.
        if (start := self._rest.rstrip(b"\r").rfind(b"\r") + 1) > 0:
            del self._rest[:start]
        if len(self._rest) > self._limit:
            lines.append(_last_version(self._rest))
            self._rest.clear()
        return lines

    def finish(self) -> list[bytes]:
        """Return the last line if it has no end."""
        lines = [_last_version(self._rest)] if self._rest else []
        self._rest.clear()
        return lines


class Prefix:
    """Puts the rank in front of every line, in colour where that helps.

    >>> Prefix(3, colour=False).join([b"loss 0.5", b"saved"])
    b'[3] loss 0.5\\n[3] saved\\n'
    """

    def __init__(self, rank: int, *, colour: bool) -> None:
        text = f"[{rank}]"
        self._start = (f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m " if colour else f"{text} ").encode()

    def join(self, lines: Iterable[bytes]) -> bytes:
        """Give the lines with prefixes and line ends, ready to be written at once."""
        return b"".join(self._start + line + b"\n" for line in lines)


class Sink:
    """One of the launcher's own streams. Holds what the stream does not take yet."""

    def __init__(self, file: int, *, high_water: int = 1 << 20) -> None:
        self._file = file
        self._pending = bytearray()
        self._high_water = high_water
        self._poll = select.poll()
        self._poll.register(file, select.POLLOUT)
        # A pipe that polls as writable takes PIPE_BUF bytes without blocking, and a terminal about as much.
        self._piece = 1 << 20 if stat.S_ISREG(os.fstat(file).st_mode) else select.PIPE_BUF
        self.broken = False
        """Whether the reader of the stream is gone. What is written is dropped from then on."""

    def fileno(self) -> int:
        """Give the number of the stream, for a selector."""
        return self._file

    @property
    def waiting(self) -> bool:
        """Whether something is left to be written when the stream takes more."""
        return bool(self._pending)

    @property
    def full(self) -> bool:
        """Whether so much is left that ranks should have to wait until it is written."""
        return len(self._pending) > self._high_water

    def write(self, data: bytes) -> None:
        """Write what the stream takes now and keep the rest."""
        if not self.broken:
            self._pending += data
            self.pump()

    def pump(self) -> None:
        """Write more of what is left, while the stream takes it."""
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
        except OSError:  # no reader, a full disk, a terminal that hung up: nobody can be told there
            self.broken = True
            self._pending.clear()


def wants_colour(environment: Mapping[str, str], *, terminal: bool) -> bool:
    """Decide whether prefixes are coloured: on a terminal, unless it is dumb or NO_COLOR is set (no-color.org).

    >>> wants_colour({"TERM": "xterm"}, terminal=True), wants_colour({"NO_COLOR": "1"}, terminal=True)
    (True, False)
    """
    return terminal and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def _last_version(line: bytearray) -> bytes:
    return bytes(line.rstrip(b"\r").rpartition(b"\r")[2])
