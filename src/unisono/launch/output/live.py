"""Lines that are drawn repeatedly, such as progress bars: their final text, and how a terminal shows them.

`LiveLines` interprets the bytes that one rank writes to one stream as a terminal would, as far as progress bars need.
`LiveArea` keeps the lines that are not final at the bottom of a terminal. Both are pure: bytes in, bytes out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["LiveArea", "LiveLines", "cut_to_width", "plain_text"]

_TOKEN = re.compile(rb"(\r|\n|\x1b\[\d*[AFK])")
_SPECIAL = re.compile(rb"\r|\x1b\[\d*[AFK]|\x1b(\[\d*)?\Z")
_CUT_OFF = re.compile(rb"\x1b(\[\d*)?\Z")
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

_MOST_ROWS = 24
"""Rows that a rank may go back to: more than nested progress bars take."""


@dataclass(eq=False, slots=True)
class _LiveRow:
    """One row that is not final."""

    text: bytearray = field(default_factory=bytearray)
    returned: bool = False
    """True if the cursor is at its start, so that the next bytes replace the text."""
    drawn: bool = False
    """True if it was overwritten, as a progress bar is."""
    left_s: float = 0.0
    """When the cursor went down from it."""


class LiveLines:
    """Cuts a stream of bytes into lines, independently of the pieces in which it arrives.

    Of a line that was overwritten, after carriage returns or after the cursor went up again, as nested progress bars
    do, the last version remains. Such a line is held for `hold_s` seconds after its end, in case the cursor comes back.
    A line longer than `limit` bytes is returned in parts, so that a stream without line ends cannot fill the memory.

    >>> lines = LiveLines()
    >>> lines.feed(b"one\\r\\ntw", 0.0), lines.feed(b"o\\n 10%\\r 20%", 0.0), lines.live, lines.finish()
    ([b'one'], [b'two'], [b' 20%'], [b' 20%'])
    """

    def __init__(self, *, hold_s: float = 0.1, limit: int = 1 << 24) -> None:
        self._hold_s = hold_s
        self._limit = limit
        self._rows = [_LiveRow()]
        self._cursor = 0
        self._climbs = False
        self._cut_off = b""

    @property
    def deadline_s(self) -> float | None:
        """When `settle` has a line to return, if nothing else is written."""
        return self._rows[0].left_s + self._hold_s if self._cursor > 0 else None

    @property
    def live(self) -> list[bytes]:
        """The lines that are not final, as they look now."""
        return [bytes(row.text) for row in self._rows if row.text.strip()]

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Process the next bytes and return the lines that have become final, without line ends."""
        if self._cut_off:
            data, self._cut_off = self._cut_off + data, b""
        row = self._rows[-1]
        if len(self._rows) == 1 and not (row.drawn or row.returned or self._climbs or _SPECIAL.search(data)):
            lines = self._feed_plain(row, data)
        else:
            self._feed_drawn(data, now_s)
            lines = self._take(now_s)
        if len(self._rows) == 1 and len(self._rows[0].text) > self._limit:
            lines += self.finish()
        return lines

    def settle(self, now_s: float) -> list[bytes]:
        """Return the lines to which the cursor has not come back in time."""
        return self._take(now_s)

    def finish(self) -> list[bytes]:
        """Return all lines that are left, including a last one without an end."""
        self._rows[self._cursor].text += self._cut_off
        # A bar that was wiped out is gone, and an empty last row was never written to.
        lines = [bytes(row.text) for row in self._rows[:-1] if not _wiped(row)]
        if (last := self._rows[-1]).text and not _wiped(last):
            lines.append(bytes(last.text))
        self._rows, self._cursor, self._climbs, self._cut_off = [_LiveRow()], 0, False, b""
        return lines

    def _feed_plain(self, row: _LiveRow, data: bytes) -> list[bytes]:
        first, *others = data.split(b"\n")
        row.text += first
        if not others:
            return []
        lines = [bytes(row.text), *others[:-1]]
        row.text[:] = others[-1]
        return lines

    def _feed_drawn(self, data: bytes, now_s: float) -> None:
        if found := _CUT_OFF.search(data):
            data, self._cut_off = data[: found.start()], found[0]
        for number, piece in enumerate(_TOKEN.split(data)):
            row = self._rows[self._cursor]
            if number % 2 == 0:
                if piece:
                    self._write(row, piece)
            elif piece == b"\r":
                row.returned = True
            elif piece == b"\n":
                self._go_down(row, now_s)
            elif piece.endswith(b"K"):
                # Erase the row, or the part right of the cursor.
                if row.returned or piece == b"\x1b[2K":
                    row.text.clear()
                    row.drawn = True
            else:
                self._cursor = max(0, self._cursor - int(piece[2:-1] or 1))
                self._climbs = True
                self._rows[self._cursor].returned |= piece.endswith(b"F")

    def _write(self, row: _LiveRow, piece: bytes) -> None:
        if row.returned:
            row.text.clear()
            row.drawn, row.returned = True, False
        row.text += piece

    def _go_down(self, row: _LiveRow, now_s: float) -> None:
        row.returned = False
        row.left_s = now_s
        self._cursor += 1
        if self._cursor == len(self._rows):
            self._rows.append(_LiveRow())
        else:
            self._rows[self._cursor].returned = True

    def _take(self, now_s: float) -> list[bytes]:
        lines = []
        while self._cursor > 0:
            row = self._rows[0]
            held = (row.drawn or self._climbs) and len(self._rows) <= _MOST_ROWS
            if held and now_s < row.left_s + self._hold_s:
                break
            del self._rows[0]
            self._cursor -= 1
            if not _wiped(row):
                lines.append(bytes(row.text))
        if len(self._rows) == 1:
            self._climbs = False
        return lines


class LiveArea:
    """The lines that are not final, at the bottom of a terminal.

    >>> area = LiveArea()
    >>> area.draw([b"[0]  10%"], columns=80), area.erase(), area.erase()
    (b'[0]  10%', b'\\r\\x1b[2K', b'')
    """

    def __init__(self) -> None:
        self.rows = 0
        """How many rows are on the terminal."""

    def draw(self, lines: Sequence[bytes], *, columns: int) -> bytes:
        """Return the bytes that draw the lines below the latest output. The area must not be on the terminal."""
        self.rows = len(lines)
        # A row as wide as the terminal may wrap, and could then not be erased.
        return b"\n".join(cut_to_width(line, max(1, columns - 1)) for line in lines)

    def erase(self) -> bytes:
        """Return the bytes that remove the area from the terminal, and put the cursor where the area began."""
        rows, self.rows = self.rows, 0
        return b"\r\x1b[2K" + b"\x1b[1A\x1b[2K" * (rows - 1) if rows else b""


def cut_to_width(line: bytes, columns: int) -> bytes:
    """Cut a line to a number of cells of a terminal. Colours take none; other control characters are left out.

    >>> cut_to_width(b"\\x1b[31mloss\\x1b[0m 0.5", 6)
    b'\\x1b[31mloss\\x1b[0m 0\\x1b[0m'
    """
    text = line.decode(errors="replace").expandtabs()
    parts, start, room, coloured = [], 0, columns, False
    while start < len(text) and room > 0:
        if found := _ESCAPE.match(text, start):
            start = found.end()
            if found[0].endswith("m"):
                parts.append(found[0])
                coloured = True
            continue
        sign = text[start]
        start += 1
        width = _cells(sign)
        if 0 <= width <= room:
            parts.append(sign)
        room -= max(0, width)
    return ("".join(parts) + "\x1b[0m" * coloured).encode()


def plain_text(line: bytes) -> str:
    """Return a line as text, without colours and other control characters.

    >>> plain_text(b"\\x1b[31mloss\\x1b[0m\\t0.5")
    'loss    0.5'
    """
    text = _ESCAPE.sub("", line.decode(errors="replace")).expandtabs()
    return text if text.isprintable() else "".join(sign for sign in text if _cells(sign) >= 0)


def _cells(sign: str) -> int:
    """Return the number of cells that a character takes; -1 if it must not be printed."""
    if " " <= sign <= "~":
        return 1
    if unicodedata.category(sign) in ("Cc", "Cs"):
        return -1
    if unicodedata.combining(sign) or unicodedata.category(sign) in ("Cf", "Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(sign) in "WF" else 1


def _wiped(row: _LiveRow) -> bool:
    return row.drawn and not row.text.strip()
