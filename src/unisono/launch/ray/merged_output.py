"""The output of several launchers on one terminal: whole lines, and once what all of them say. Pure.

Start reading at `MergedOutput`.
"""

from __future__ import annotations

from typing import TextIO

__all__ = ["MergedOutput"]

_OURS = "unisono: "
_SAME_S = 30.0
"""For how long a line of a launcher is taken for what another one has said."""


class MergedOutput:
    """Writes what launchers print, line by line. A line of theirs that another one has just written is left out.

    All launchers of a job say what concerns the whole job, each on its terminal; here they share one. What ranks print
    has the rank in front, and is never left out.

    Args:
        streams: Standard output and standard error.
    """

    def __init__(self, *streams: TextIO) -> None:
        self._streams = streams
        self._begun: dict[tuple[str, int], str] = {}
        self._said: dict[tuple[str, int], tuple[str, float, set[str]]] = {}

    def write(self, source: str, number: int, text: str, *, now_s: float) -> None:
        """Write what a launcher has printed, but for the line that it has only begun.

        Args:
            source: The launcher.
            number: The stream: 0 or 1.
            text: What it has printed.
            now_s: The time.
        """
        *lines, self._begun[source, number] = (self._begun.get((source, number), "") + text).split("\n")
        for line in lines:
            if not self._is_repeated(source, number, line, now_s):
                self._streams[number].write(f"{line}\n")
        if lines:
            self._streams[number].flush()

    def end(self, source: str) -> None:
        """Write the lines that a launcher has begun and not ended, since it has ended."""
        for number, stream in enumerate(self._streams):
            if rest := self._begun.pop((source, number), ""):
                stream.write(f"{rest}\n")
                stream.flush()

    def say(self, text: str) -> None:
        """Write a line of our own to the last stream."""
        self._streams[-1].write(f"{_OURS}{text}\n")
        self._streams[-1].flush()

    def _is_repeated(self, source: str, number: int, line: str, now_s: float) -> bool:
        if not line.startswith(_OURS):
            return False
        # The same line comes once from each launcher; a second one from the same launcher is news.
        _, begun_s, sources = self._said.get((line, number), (line, 0.0, {source}))
        if source in sources or now_s - begun_s > _SAME_S:
            self._said[line, number] = line, now_s, {source}
            return False
        sources.add(source)
        return True
