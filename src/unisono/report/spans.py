"""Spans of time on a timeline in bounded memory: neighbours are drawn together once there are too many."""

from __future__ import annotations

from typing import Any

__all__ = ["Spans", "WaitSamples"]

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


class WaitSamples:
    """Samples of how long each rank has waited so far; every second one is dropped once there are too many.

    The numbers are sums, so that nothing is lost but detail.

    Args:
        most: The greatest number of samples.
    """

    def __init__(self, most: int = 240) -> None:
        self._most = most
        self._samples: list[tuple[float, list[float]]] = []

    def add(self, at_s: float, waits_s: list[float]) -> None:
        """Add a sample: a time, and the seconds that each rank has waited until then."""
        self._samples.append((at_s, waits_s))
        if len(self._samples) > self._most:
            self._samples = [*self._samples[:-1:2], self._samples[-1]]

    def document(self) -> list[list[Any]]:
        """Return [start, end, part of the time that each rank waited] of each interval between two samples."""
        found: list[list[Any]] = []
        for (start, before), (end, after) in zip(self._samples, self._samples[1:], strict=False):
            # Counts begin anew with each process, and with another number of ranks.
            if end > start and len(before) == len(after) and all(b <= a for b, a in zip(before, after, strict=True)):
                parts = [round(min(1.0, (a - b) / (end - start)), 3) for b, a in zip(before, after, strict=True)]
                found.append([round(start, 3), round(end, 3), parts])
        return found
