"""Lets all ranks know, in a step, what rank 0 alone has found: that a checkpoint is due after it. No exchange is added.

It is one of the totals of a step (`engine.totals.Wants`), which are equal on all ranks.
"""

from __future__ import annotations

__all__ = ["SaveAnnouncement"]


class SaveAnnouncement:
    """See `run_context.Agreement`."""

    def __init__(self) -> None:
        self._is_wanted = False
        self.is_agreed = False
        """True if all ranks know that a checkpoint is due when the loop asks. Equal on all ranks."""
        self.has_stepped = False
        """True if ranks have made a step together since they met. Before it, some may have asked for a batch or an
        epoch as the ranks that they were, and others ask for the same one now."""

    def announce(self, *, is_wanted: bool) -> None:
        """Note on rank 0, before a step, whether a checkpoint is due after it."""
        self._is_wanted = is_wanted

    def is_wanted(self) -> bool:
        """Return what `announce` noted."""
        return self._is_wanted

    def agree(self, *, is_wanted: bool) -> None:
        """Note in a step what all ranks know of it together."""
        self.is_agreed |= is_wanted
        self.has_stepped = True

    def forget(self) -> None:
        """Begin anew: the loop has asked."""
        self._is_wanted = self.is_agreed = False

    def meet(self) -> None:
        """Begin anew: ranks meet, at the start or after some were replaced."""
        self.forget()
        self.has_stepped = False
