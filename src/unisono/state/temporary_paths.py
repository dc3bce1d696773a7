"""Names of folders and files that are being written, or about to be removed, beside those that are complete.

They are `.tmp-`, the process, random digits, why a complete one has been moved aside if it has, and the complete one's
name. So no reader takes one for a checkpoint, and the next writer finds what is left of one that died.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Literal

from unisono.state.best import BEST_LEFTOVERS
from unisono.state.durable_files import failing_with_remedy, flush_folder, is_locked

__all__ = ["meeting_path", "new_mark", "remove_leftovers", "temporary_path"]

_LEFTOVER = re.compile(r"\.tmp-[0-9]+-[0-9a-f]+-(?:(replaced|pruned)-)?(step-[0-9]{9,}|tag-.+)")


def temporary_path(final: Path, why: Literal["replaced", "pruned"] | None = None, *, mark: str | None = None) -> Path:
    """Return a path beside another one, which no other call returns.

    Args:
        final: The path that is written, or that has been.
        why: Why it is moved aside; None: it is written.
        mark: The process and the digits, if several processes are to know the path: see `new_mark`.
    """
    kind = "" if why is None else f"{why}-"
    return final.with_name(f".tmp-{new_mark() if mark is None else mark}-{kind}{final.name}")


def new_mark() -> str:
    """Return this process and random digits, to which more of 0 … 9 and a … f may be appended."""
    return f"{os.getpid()}-{secrets.token_hex(4)}"


def meeting_path(folder: Path, mark: str, rank: int = 0) -> Path:
    """Return the path of a file by which ranks find out whether they see the same folder.

    Args:
        folder: The folder of the checkpoints.
        mark: What rank 0 has made for this meeting, by `new_mark`.
        rank: The rank that makes the file.
    """
    return folder / f".met-{mark}-{rank}"


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove what writers that died have left among checkpoints, and return the folders removed.

    A checkpoint that was moved aside to be replaced, by a writer that died before the replacement, is put back. A
    folder that is being written is left alone: its writer holds a lock on it, which ends with the process.

    Raises:
        CheckpointError: A leftover cannot be removed.
    """
    removed: list[Path] = []
    with failing_with_remedy(folder, f"leftovers of a dead writer in {folder} cannot be removed"):
        for name in BEST_LEFTOVERS:
            (folder / name).unlink(missing_ok=True)
        for path in folder.glob(".met-*-*"):
            path.unlink(missing_ok=True)
        for path in sorted(folder.glob(".tmp-*-*")):
            found = _LEFTOVER.fullmatch(path.name)
            if not found or not path.is_dir() or is_locked(path) or any(map(is_locked, path.glob("part-*.lock"))):
                continue
            final = folder / found[2]
            if found[1] == "replaced" and not final.exists():
                path.rename(final)
                flush_folder(folder)
            else:
                shutil.rmtree(path)
                removed.append(path)
    return removed
