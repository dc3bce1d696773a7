"""Texts and images that a run has logged: a few of each name, from its first to its latest. Pure.

Start reading at `Samples.add`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Samples"]


class Samples:
    """Entries by name and step, in bounded memory: evenly spread ones, the latest among them.

    Of one name and step, the last entry counts, since steps are repeated after a resume.

    Args:
        names: The greatest number of names.
        most: The greatest number of entries of a name.

    >>> samples = Samples(names=1, most=3)
    >>> for step in range(10):
    ...     samples.add("a", step, {"text": f"after {step}"})
    >>> [entry["step"] for entry in samples.document()["a"]]
    [0, 8, 9]
    """

    def __init__(self, *, names: int, most: int) -> None:
        self._names, self._most = names, most
        self._of: dict[str, _Entries] = {}
        self.left_out: set[str] = set()
        """Some of the names that there was no place for."""

    def add(self, name: str, step: int, entry: dict[str, Any]) -> None:
        """Add an entry, whose step is that of the one before or a later one."""
        if name not in self._of:
            if len(self._of) >= self._names:
                if len(self.left_out) < self._names:
                    self.left_out.add(name)
                return
            self._of[name] = _Entries()
        self._of[name].add({"step": step, **entry}, self._most)

    def rewind(self, step: int) -> None:
        """Drop what came after a step, which is about to come again."""
        for entries in self._of.values():
            entries.kept = [each for each in entries.kept if each[1]["step"] <= step]

    def document(self) -> dict[str, list[dict[str, Any]]]:
        """Return the entries of each name, in the order of their steps."""
        return {name: [entry for _, entry in entries.kept] for name, entries in self._of.items() if entries.kept}


class _Entries:
    """The entries of one name: every `stride`-th, and the latest."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, dict[str, Any]]] = []
        """The number of each entry, counted from 0, and the entry."""
        self.stride = 1

    def add(self, entry: dict[str, Any], most: int) -> None:
        number = 0
        if self.kept:
            number = self.kept[-1][0] + 1
            if self.kept[-1][1]["step"] == entry["step"]:
                number = self.kept.pop()[0]
            elif self.kept[-1][0] % self.stride:
                self.kept.pop()
        self.kept.append((number, entry))
        while len(self.kept) > most:
            self.stride *= 2
            *others, last = self.kept
            self.kept = [*(each for each in others if each[0] % self.stride == 0), last]
