"""Ranks that stay when the others have ended well, and do nothing: stuck at their end, where no collective shows it.

A thread or a child that is waited for does that, and so does a lock that two threads of a library want. A rank that
still computes, or that others have not left yet, is let alone. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Stragglers"]

_IDLE = 0.1
"""Cores that a rank keeps busy at most while it does nothing: threads of gloo and others look around."""


class Stragglers:
    """Decides when ranks that are left have done nothing for so long that it has to be said; that is once.

    Args: patience_s, 0 for never.

    >>> stragglers = Stragglers(30.0)
    >>> stragglers.look(0.0, ended=2, computed_s={1: 5.0}), stragglers.look(31.0, ended=2, computed_s={1: 5.5})
    ((), (1,))
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since_s: float | None = None
        self._before: dict[int, float] = {}
        self._told = False

    @property
    def since_s(self) -> float:
        """Since when they have been looked at, on the clock of `look`."""
        return self._since_s or 0.0

    def look(self, now_s: float, *, ended: int, computed_s: Mapping[int, float]) -> tuple[int, ...]:
        """Say which ranks have done nothing since others ended, once that is long enough.

        Args: ended is how many ranks have ended without an error; computed_s, by rank, is how many seconds each of the
            others has computed so far.
        """
        if self._told or not self._patience_s or not ended or not computed_s:
            return ()
        if self._since_s is None or self._before.keys() != computed_s.keys():
            self._since_s, self._before = now_s, dict(computed_s)
            return ()
        past_s = now_s - self._since_s
        if past_s < self._patience_s:
            return ()
        if any(computed - self._before[rank] > _IDLE * past_s for rank, computed in computed_s.items()):
            self._since_s = None
            return ()
        self._told = True
        return tuple(sorted(computed_s))
