"""The bases of a run's next increments: files of earlier checkpoints, which get a link in the folder of a new one.

Start reading at `IncrementBases`; `increments` describes what an increment is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from unisono.state.checkpoint_work import CheckpointWork
from unisono.state.codec import Json
from unisono.state.increments import BaseFile, Increment, base_name, find_increment
from unisono.state.manifest import SUFFIX
from unisono.state.regions import FileEntry

__all__ = ["IncrementBases", "base_entries"]


class IncrementBases:
    """The bases in checkpoints that this process has written.

    For a checkpoint that one process writes, the calls are `find` for each group, then `keep`. If several ranks write
    it, they are `link`, then `unlink_others` when it is known which groups have an increment, and `keep`.
    """

    def __init__(self) -> None:
        self.files: dict[str, BaseFile] = {}
        """By group."""

    def find(self, group: str, tensors: Mapping[str, Tensor], work: CheckpointWork) -> Increment | None:
        """Return what a group has changed since its base, which is then in the new folder; None to store all of it."""
        base = self.files.get(group)
        if base is None:
            return None
        work.begin()
        increment = find_increment(tensors, base, work.path)
        return increment if increment is not None and _link(base, group, work) else None

    def link(self, work: CheckpointWork) -> dict[str, BaseFile]:
        """Put all bases into the folder of a new checkpoint, and return those for which that could be done."""
        return {group: base for group, base in self.files.items() if _link(base, group, work)}

    def unlink_others(self, work: CheckpointWork, groups: Collection[str]) -> dict[str, BaseFile]:
        """Return the bases of some groups, and remove those of others from the folder of a new checkpoint.

        Raises:
            OSError: One cannot be removed.
        """
        linked: dict[str, BaseFile] = {}
        for group, base in self.files.items():
            if group in groups:
                linked[group] = base
            else:
                (work.path / _file_name(group)).unlink(missing_ok=True)
        return linked

    def keep(
        self,
        path: Path,
        entries: Mapping[str, FileEntry],
        described: Mapping[str, dict[str, Json]],
        linked: Mapping[str, BaseFile],
        *,
        mark: str = "",
    ) -> None:
        """Note against what the next checkpoint is compared: with the bases of this one, or its own files.

        Args:
            path: The folder of this checkpoint.
            entries: Its files by name.
            described: By group, the description of its file.
            linked: The bases in this checkpoint, by group.
            mark: See `BaseFile`.
        """
        for group in described:
            entry = entries[group + SUFFIX]
            base = linked.get(group)
            if base is None:
                self.files[group] = BaseFile(path / entry.name, entry, described[group], mark=mark)
            else:
                base.path = path / _file_name(group)
                base.spent += entry.nbytes


def base_entries(linked: Mapping[str, BaseFile]) -> list[FileEntry]:
    """Return the entries of bases for the manifest of a checkpoint that they are linked into."""
    return [replace(base.entry, name=_file_name(group)) for group, base in linked.items()]


def _link(base: BaseFile, group: str, work: CheckpointWork) -> bool:
    try:
        os.link(base.path, work.path / _file_name(group))
    except OSError:  # a file system without hard links, or the base has been deleted
        return False
    return True


def _file_name(group: str) -> str:
    return base_name(group) + SUFFIX
