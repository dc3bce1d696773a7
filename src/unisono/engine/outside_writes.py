"""Finds the buffers that a loop has written between two steps, for the comparison of ranks."""

from __future__ import annotations

from collections.abc import Iterable

from unisono.engine.tracked_buffer import TrackedBuffer
from unisono.state.digest import digest

__all__ = ["OutsideWrites"]


class OutsideWrites:
    """Knows the digests that written buffers had when all ranks had the same, until a step with them succeeds."""

    def __init__(self) -> None:
        self._agreed: dict[str, str] = {}

    def find(self, buffers: Iterable[TrackedBuffer]) -> dict[str, str]:
        """Return the persistent buffers that were written since the last step, with a digest of each; before a step.

        Others may be caches, of which each rank has its own.
        """
        found = {}
        for tracked in buffers:
            if tracked.is_persistent and tracked.was_written():
                self._agreed.setdefault(tracked.path, digest({"": tracked.before}))
            if tracked.path in self._agreed:
                found[tracked.path] = digest({"": tracked.current})
        return {path: sha for path, sha in found.items() if sha != self._agreed[path]}

    def forget(self) -> None:
        """Begin anew: all ranks have the same values."""
        self._agreed.clear()
