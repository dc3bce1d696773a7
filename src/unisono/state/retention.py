"""Which older checkpoint is kept for its base files: one damaged file must not be the damage of all that are left."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from unisono.state.increments import base_name
from unisono.state.manifest import SUFFIX

__all__ = ["with_other_bases"]


def with_other_bases(kept: Sequence[Path], others: Sequence[Path]) -> Path | None:
    """Return the first of other checkpoints that shares no base with all kept ones; None if these do not share one."""
    if not any(any(folder.glob(f"*{base_name('')}{SUFFIX}")) for folder in kept):
        return None
    shared = frozenset.intersection(*map(_inodes, kept))
    return next((folder for folder in others if not shared & _inodes(folder)), None) if shared else None


def _inodes(checkpoint: Path) -> frozenset[int]:
    """Return the inodes of the files of a checkpoint."""
    with suppress(FileNotFoundError):
        return frozenset(file.stat().st_ino for file in checkpoint.iterdir())
    return frozenset()
