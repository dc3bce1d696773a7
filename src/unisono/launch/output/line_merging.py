"""Merges equal lines of several ranks into one, `[0-7] epoch 1 done`, and keeps the order of every rank's lines.

A line is held for a moment, for ranks that may still print the same one. Pure: the caller passes the time. Start
reading at `LineMerger.add`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from operator import attrgetter

__all__ = ["LineMerger", "MergedLine"]

_FURTHEST = 100
"""The number of lines that the search for an equal one goes back."""
_OVERHEAD = 200
"""The approximate number of bytes that a held line takes besides its text."""


@dataclass(eq=False, slots=True)
class MergedLine:
    """One line and the ranks that printed it."""

    stream: int
    """The caller's number of the stream. Lines of different streams are different."""
    line: bytes
    """The line without its end."""
    ranks: set[int]
    """The ranks that printed it."""
    position: int
    """Its place in the order of all lines."""
    deadline_s: float
    """The time until which it may be held back."""


class LineMerger:
    """Holds lines back for at most `hold_s` seconds, and merges those that are equal.

    Held lines have one order, in which every rank's own lines are in order. A new line joins an equal one after the
    rank's last line; or one shortly before it, if the rank shares none of its lines from there on, so that they can be
    moved in front of it; otherwise it is appended. The first lines are released when no rank can join them any more:
    each rank that may still print (`expect`) shares a line at their end or after it. When more than `limit` bytes are
    held, all lines are released.

    >>> merger = LineMerger(hold_s=0.1)
    >>> _ = merger.expect({0, 1, 2})
    >>> merger.add(0, 1, [b"start", b"loss 0.5"], now_s=0.0)
    []
    >>> merger.add(1, 1, [b"start"], now_s=0.0)
    []
    >>> [(merged.line, sorted(merged.ranks)) for merged in merger.add(2, 1, [b"start"], now_s=0.0)]
    [(b'start', [0, 1, 2])]
    >>> [(merged.line, sorted(merged.ranks)) for merged in merger.due(0.1)]
    [(b'loss 0.5', [0])]
    """

    def __init__(self, *, hold_s: float = 0.1, limit: int = 1 << 20) -> None:
        self._hold_s = hold_s
        self._limit = limit
        self._held: list[MergedLine] = []
        self._equal: dict[tuple[int, bytes], list[MergedLine]] = {}
        """Held lines by stream and text, in order."""
        self._last: dict[int, MergedLine] = {}
        """The last line of each rank."""
        self._shared: dict[int, MergedLine] = {}
        """The last line of each rank that another rank printed as well. The rank can join no line before that."""
        self._next = 0
        self._nbytes = 0
        self._expected: frozenset[int] = frozenset()

    @property
    def deadline_s(self) -> float | None:
        """The time at which the first held line must be printed; None if there is none."""
        return self._held[0].deadline_s if self._held else None

    def expect(self, ranks: Collection[int]) -> list[MergedLine]:
        """Set the ranks that may still print; return the lines that wait for none of them, in order."""
        self._expected = frozenset(ranks)
        return self._settled()

    def add(self, rank: int, stream: int, lines: Iterable[bytes], now_s: float) -> list[MergedLine]:
        """Add a rank's next lines; return the lines, of any rank, that can be printed now, in order."""
        alone = not self._held and self._expected <= {rank}
        for line in lines:
            equal = self._equal.setdefault((stream, line), [])
            merged = self._find_behind(rank, equal) or self._find_before(rank, equal)
            if merged is None:
                merged = MergedLine(stream, line, {rank}, self._next, now_s + self._hold_s)
                self._next += 1
                self._nbytes += len(line) + _OVERHEAD
                self._held.append(merged)
                equal.append(merged)
            else:
                merged.ranks.add(rank)
                for other in merged.ranks:
                    if other not in self._shared or self._shared[other].position < merged.position:
                        self._shared[other] = merged
            self._last[rank] = merged
        if alone or self._nbytes > self._limit:
            return self.flush()
        return self._settled()

    def due(self, now_s: float) -> list[MergedLine]:
        """Release and return the lines that have been held long enough, and all lines before them."""
        number = 0
        while number < len(self._held) and self._held[number].deadline_s <= now_s:
            number += 1
        return self._release(number)

    def release(self, rank: int) -> list[MergedLine]:
        """Release and return the lines up to this rank's last one."""
        return self._release_through(self._last.get(rank))

    def flush(self) -> list[MergedLine]:
        """Release and return all lines that are held back."""
        return self._release(len(self._held))

    def _find_behind(self, rank: int, equal: list[MergedLine]) -> MergedLine | None:
        if not equal:
            return None
        last = self._last.get(rank)
        at = bisect_right(equal, last.position, key=attrgetter("position")) if last else 0
        return equal[at] if at < len(equal) else None

    def _find_before(self, rank: int, equal: list[MergedLine]) -> MergedLine | None:
        last, shared = self._last.get(rank), self._shared.get(rank)
        if not equal or last is None:
            return None
        after = max(last.position - _FURTHEST, shared.position if shared else -1)
        at = bisect_right(equal, after, key=attrgetter("position"))
        merged = next((merged for merged in equal[at:] if rank not in merged.ranks), None)
        if merged is not None:
            self._move(rank, merged, last)
        return merged

    def _move(self, rank: int, merged: MergedLine, last: MergedLine) -> None:
        """Move the rank's lines between `merged` and `last`, which no other rank shares, in front of `merged`."""
        start, end = (held.position - self._held[0].position for held in (merged, last))
        segment = self._held[start : end + 1]
        own, others = ([held for held in segment if (rank in held.ranks) is mine] for mine in (True, False))
        first = merged.position
        self._held[start : end + 1] = own + others
        for position, held in enumerate(own + others, start=first):
            held.position = position
        for held in own:
            held.deadline_s = min(held.deadline_s, merged.deadline_s)
            self._equal[held.stream, held.line].sort(key=attrgetter("position"))

    def _settled(self) -> list[MergedLine]:
        if not self._held:
            return []
        if not self._expected:
            return self.flush()
        shared = [self._shared.get(rank) for rank in self._expected]
        return self._release_through(min((s for s in shared if s), key=attrgetter("position")) if all(shared) else None)

    def _release_through(self, merged: MergedLine | None) -> list[MergedLine]:
        return self._release(merged.position - self._held[0].position + 1 if merged and self._held else 0)

    def _release(self, number: int) -> list[MergedLine]:
        if number <= 0:  # also if the line in question has been printed already
            return []
        released = self._held[:number]
        del self._held[:number]
        for merged in released:
            self._nbytes -= len(merged.line) + _OVERHEAD
            equal = self._equal[merged.stream, merged.line]
            equal.remove(merged)
            if not equal:
                del self._equal[merged.stream, merged.line]
        return released
