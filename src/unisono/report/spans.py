"""Spans of time on a timeline in bounded memory: neighbours are drawn together once there are too many."""

from __future__ import annotations

__all__ = ["Spans"]

_MOST = 600


class Spans:
    """Spans that come in the order of their ends; with more than `most`, each two neighbours become one.

    >>> spans = Spans(most=3)
    >>> for second in range(4):
    ...     spans.add(second, second + 0.5)
    >>> spans.document()
    [[0, 1.5, 2, 1.0], [2, 3.5, 2, 1.0]]
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._spans: list[list[float]] = []

    def add(self, start_s: float, end_s: float) -> None:
        """Add a span."""
        self._spans.append([start_s, end_s, 1, end_s - start_s])
        if len(self._spans) > self._most:
            pairs = zip(self._spans[::2], self._spans[1::2], strict=False)
            odd = self._spans[-1:] if len(self._spans) % 2 else []
            self._spans = [[min(a[0], b[0]), max(a[1], b[1]), a[2] + b[2], a[3] + b[3]] for a, b in pairs] + odd

    def document(self) -> list[list[float]]:
        """Return [start, end, number of spans, seconds of them] of each, in seconds."""
        return [[round(value, 3) for value in span] for span in self._spans]
