"""Checkpoints of a run on disk: a folder each, complete or absent, and every byte checked before it is used.

    step-000000120/
        manifest.json       each file's size and SHA-256; written last; has its own SHA-256
        model.safetensors   one file for each group of tensors, in the open safetensors format
        state.json          everything that is not a tensor
        model-base.safetensors  an earlier file, if `model.safetensors` has only rows that changed: `state.increments`
    tag-before-finetuning/  the same, under a name that the user has given; never pruned
    best.json, best         which step is the best one: see `state.best`

A checkpoint is written into a `.tmp-…` folder beside the others, flushed to the disk, then renamed: a crash at any
moment leaves the older checkpoints as they were. Nothing is read with pickle and no file is executed. Rank 0 writes, or
all ranks of a job write their parts (`part_writing`) and rank 0 completes it; any number of processes may read. Start
reading at `CheckpointStore.write` and `CheckpointStore.load`.
"""

from __future__ import annotations

import builtins  # inside CheckpointStore, `list` is its method
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.best import read_best, step_folder
from unisono.state.checkpoint_reading import read_checkpoint
from unisono.state.checkpoint_work import CheckpointWork
from unisono.state.codec import Json, to_json
from unisono.state.durable_files import (
    CheckedFile,
    failing_with_remedy,
    flush_folder,
    nbytes_of,
    remedy,
    write_file,
)
from unisono.state.increment_bases import IncrementBases, base_entries
from unisono.state.increments import BaseFile
from unisono.state.manifest import GROUP, STATE, SUFFIX, manifest_of
from unisono.state.open_checkpoint import OpenCheckpoint
from unisono.state.part_plan import PartPlan
from unisono.state.part_writing import FileRange, PartsError, PartWriter, await_parts
from unisono.state.regions import FileEntry
from unisono.state.retention import with_other_bases
from unisono.state.safetensors_format import FilePart, plan_file
from unisono.state.temporary_paths import remove_leftovers, temporary_path

__all__ = ["CheckpointInfo", "CheckpointStore", "Loaded"]

_STEP = re.compile(r"step-([0-9]{9,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """The path, step and size of a checkpoint, which may be damaged: `CheckpointStore.verify` checks it."""

    path: Path
    """The folder of the checkpoint."""
    step: int
    """The step at which it was made, according to the folder's name."""
    nbytes: int
    """The total size of its files."""


class Loaded(NamedTuple):
    """A checkpoint in memory."""

    info: CheckpointInfo
    groups: dict[str, dict[str, Tensor]]
    """Tensors by group and name, each in separate CPU memory; tied names share one."""
    document: Json


class CheckpointStore:
    """The folder of the checkpoints of one run, a `step-…` folder each; other files are left alone.

    Args:
        folder: The folder.
        incremental: True to store only the changed rows of large tensors, where that takes less space.
    """

    def __init__(self, folder: Path, *, incremental: bool = False) -> None:
        self.folder = Path(folder)
        self._incremental = incremental
        self._bases = IncrementBases()
        # This process has written and flushed them: `prune` need not read them to know that they are good.
        self._written: set[Path] = set()

    def write(
        self, step: int, groups: Mapping[str, Mapping[str, Tensor]], document: Json, *, tag: str | None = None
    ) -> CheckpointInfo:
        """Write a checkpoint and return its path and size when it is safe on the disk.

        Not a collective: one rank writes. Tensors that view the same memory are stored once. Tensors that are not
        contiguous or not on the CPU are copied one at a time. A checkpoint of the same step is replaced, whatever its
        content: a resumed run that reaches the step again may have fallen back because that one was damaged. The old
        one stays until the new one is complete.

        Args:
            step: The number of steps done.
            groups: Tensors by group and name.
            document: Everything else.
            tag: The name under which it is kept, as `policy.check_tag` allows. `list` and `prune` do not see it, and a
                checkpoint with the same tag is replaced. None: it is the one of its step.

        Raises:
            CheckpointError: The checkpoint cannot be written. The message has the reason, the bytes needed and free,
                and the remedy; the earlier checkpoints are untouched and nothing else is left.
            TypeError: The document is not JSON, or an argument has the wrong type.
            ValueError: The step is negative, or a group's name is invalid.
        """
        files: list[tuple[str, list[FilePart]]] = []
        described: dict[str, dict[str, Json]] = {}
        total = sum(nbytes_of(tensors.items()) for tensors in groups.values())
        work = CheckpointWork(self.folder, step, tag, needed=total)
        linked: dict[str, BaseFile] = {}
        try:
            for group, tensors in groups.items():
                if not GROUP.fullmatch(group):
                    raise ValueError(
                        f"group name {group!r}: use letters, digits, '_' and '-': it is part of a file's name"
                    )
                increment = self._bases.find(group, tensors, work) if self._incremental and tag is None else None
                pieces, described[group] = plan_file(tensors if increment is None else increment.tensors, group)
                if increment is not None:
                    described[group]["base"] = increment.notes
                    linked[group] = self._bases.files[group]
                files.append((group + SUFFIX, pieces))
            files.append((STATE, [to_json(document)]))
            work.needed = sum(nbytes_of(pieces) for _, pieces in files)
            work.begin()
            entries: list[FileEntry] = []
            for name, pieces in files:
                work.doing = f"writing {name}"
                entries.append(write_file(work.path / name, pieces))
            bases = base_entries(linked)
            path, nbytes = work.commit([*entries, *bases], described)
        except OSError as error:
            raise work.explained(error) from error
        finally:
            work.close()
        self._written.add(path)
        if self._incremental and tag is None:
            self._bases.keep(path, {entry.name: entry for entry in entries}, described, linked)
        return CheckpointInfo(path=path, step=step, nbytes=nbytes - sum(base.nbytes for base in bases))

    def begin_parts(self, step: int, *, tag: str | None = None, mark: str | None = None) -> CheckpointWork:
        """Begin a checkpoint that several ranks write, on rank 0. The call after it is `write_parts`.

        Args:
            step: The number of steps done.
            tag: See `write`.
            mark: What the others know of the folder's name: see `temporary_path`.

        Raises:
            CheckpointError: Its folder cannot be made.
        """
        work = CheckpointWork(self.folder, step, tag, mark=mark)
        try:
            work.begin()
        except OSError as error:
            raise work.explained(error) from error
        return work

    def link_bases(self, work: CheckpointWork) -> Mapping[str, BaseFile]:
        """Put the bases of groups into the folder of a new checkpoint, and return those for which that could be done.

        Args:
            work: What `begin_parts` returned.
        """
        return self._bases.link(work) if self._incremental else {}

    def write_parts(
        self,
        work: CheckpointWork,
        writer: PartWriter,
        ranges: Sequence[FileRange],
        *,
        plans: Mapping[str, PartPlan],
        groups: Mapping[str, Mapping[str, Tensor]],
        document: Json,
        ranks: Sequence[int] | None = None,
        gives_up: Callable[[bool], str] = lambda _is_begun: "",
        increments: Mapping[str, dict[str, Json]] | None = None,
    ) -> CheckpointInfo:
        """Write the part of rank 0, wait for those of others, and return when the checkpoint is safe on the disk.

        Not a collective: it waits for files. Memory: none.

        Args:
            work: What `begin_parts` returned.
            writer: Writes this rank's part.
            ranges: This rank's part.
            plans: The plan of each group that ranks have parts of.
            groups: The groups that this rank writes alone.
            document: Everything else.
            ranks: Those that write, in the order of the plans. None: all.
            gives_up: See `await_parts`.
            increments: The notes of the groups of which changed rows are written; the others are bases from then on.
                None: no group is, and none is a base.

        Raises:
            CheckpointError: See `write`; also, caused by PartsError, if another rank could not write its part, or has
                died.
        """
        files = {group + SUFFIX: plan.layout for group, plan in plans.items()}
        described = {group: {**plan.layout.described} for group, plan in plans.items()}
        linked: dict[str, BaseFile] = {}
        try:
            if increments is not None:
                linked = self._bases.unlink_others(work, increments)
                for group in linked:
                    described[group]["base"] = increments[group]
            text = to_json(document)
            own: list[FileEntry] = []
            for group, tensors in groups.items():
                work.doing = f"writing {group}{SUFFIX}"
                pieces, described[group] = plan_file(tensors, group)
                work.needed += nbytes_of(pieces)
                own.append(write_file(work.path / (group + SUFFIX), pieces))
            work.doing = f"writing {STATE}"
            work.needed += len(text) + sum(layout.nbytes for layout in files.values())
            own.append(write_file(work.path / STATE, [text]))
            work.doing = "writing the parts of ranks"
            writer.write(ranges, files)
            if ranks is None:
                ranks = range(len(next(iter(plans.values())).starts))
            entries = await_parts(work.path, ranks, files, gives_up=gives_up)
            bases = base_entries(linked)
            path, nbytes = work.commit([*entries, *own, *bases], described)
        except OSError as error:
            raise work.explained(error) from error
        except PartsError as error:
            advice = f" {remedy(OSError(error.number, ''), self.folder)}" if error.number else ""
            raise CheckpointError(
                f"the checkpoint of {work.told} was not written to {self.folder}: {error}. Older checkpoints are "
                f"untouched.{advice}"
            ) from error
        finally:
            writer.close()
            work.close()
        self._written.add(path)
        if increments is not None:
            files_of = {entry.name: entry for entry in entries}
            self._bases.keep(path, files_of, {group: described[group] for group in plans}, linked, mark=work.path.name)
        return CheckpointInfo(path=path, step=work.step, nbytes=nbytes - sum(base.nbytes for base in bases))

    def open(self, info: CheckpointInfo) -> OpenCheckpoint:
        """Return a checkpoint of which parts can be read; what is read is compared with its hashes.

        Raises:
            CorruptCheckpointError: Its manifest is damaged.
        """
        return OpenCheckpoint(info.path)

    def step_path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which need not exist."""
        return self.folder / step_folder(step)

    def list(self) -> builtins.list[CheckpointInfo]:
        """Return the checkpoints by the names of their folders, newest first, also damaged ones.

        Raises:
            CheckpointError: The folder cannot be read. A folder that does not exist has no checkpoints.
        """
        infos: list[CheckpointInfo] = []
        what = f"the checkpoints in {self.folder} cannot be listed"
        with failing_with_remedy(self.folder, what), suppress(FileNotFoundError):
            for path in self.folder.iterdir():
                found = _STEP.fullmatch(path.name)
                if not found or path.name != step_folder(int(found[1])) or not path.is_dir():
                    continue
                with suppress(FileNotFoundError):  # pruned in the meantime
                    nbytes = sum(file.stat().st_size for file in path.iterdir())
                    infos.append(CheckpointInfo(path=path, step=int(found[1]), nbytes=nbytes))
        return sorted(infos, key=lambda info: info.step, reverse=True)

    def verify(self, info: CheckpointInfo) -> None:
        """Read a checkpoint once and compare every byte's hash with its manifest; constant memory.

        Files that the manifest does not name are ignored: they are never read.

        Raises:
            CorruptCheckpointError: A file is damaged; the message names it, with expected and found values.
        """
        for entry in manifest_of(info.path).files:
            with CheckedFile(info.path / entry.name, entry) as file:
                file.finish()

    def load(
        self,
        info: CheckpointInfo,
        *,
        groups: Collection[str] | None = None,
        into: Mapping[tuple[str, str], Tensor] | None = None,
    ) -> Loaded:
        """Return a checkpoint's values, and compare every byte's hash with its manifest in the same pass.

        Memory: that of the tensors; each is read directly into its final memory.

        Args:
            info: The checkpoint.
            groups: The groups of tensors to read, if the checkpoint has them. None: all.
            into: Memory for some tensors by group and name, which is used if its type and shape are right. If this
                raises, it may have been written.

        Raises:
            CorruptCheckpointError: A file is damaged; the message names it, with expected and found values.
        """
        return Loaded(info, *read_checkpoint(info.path, groups=groups, into=into))

    def load_newest(
        self,
        *,
        groups: Collection[str] | None = None,
        into: Mapping[tuple[str, str], Tensor] | None = None,
    ) -> tuple[Loaded | None, builtins.list[CorruptCheckpointError]]:
        """Return the newest checkpoint that is not damaged, and the errors of all newer ones.

        (None, []) means that there is no checkpoint; (None, errors) that all are damaged, which a caller should not
        mistake for a fresh start. Cost: reads each checkpoint up to the first good one, once. `groups` and
        `into`: see `load`.
        """
        errors: list[CorruptCheckpointError] = []
        for info in self.list():
            try:
                return self.load(info, groups=groups, into=into), errors
            except CorruptCheckpointError as error:
                errors.append(error)
        return None, errors

    def prune(self, keep: int) -> builtins.list[CheckpointInfo]:
        """Delete all but the newest `keep` checkpoints, and return the deleted ones.

        The newest good one is always kept, even if `keep` newer ones are damaged; if none is good, none is deleted. If
        all that are kept share a base, so is the newest one without it: the damage of one file must not be that of all.
        The best one, which `best.read_best` returns, is kept as well. A reader sees each checkpoint complete or not at
        all. Cost: reads no checkpoint if this store wrote the newest.

        Raises:
            CheckpointError: A checkpoint cannot be deleted, or the record of the best one is damaged.
            ValueError: `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the newest checkpoint is never deleted")
        infos = self.list()
        if len(infos) <= keep:
            return []
        good = next((info for info in infos if info.path in self._written or _is_good(self, info)), None)
        if good is None:
            return []
        best = read_best(self.folder)
        doomed = [info for info in infos[keep:] if info.path != good.path and (best is None or info.step != best.step)]
        if keep > 1:
            spared = with_other_bases([info.path for info in infos[:keep]], [info.path for info in doomed])
            doomed = [info for info in doomed if info.path != spared]
        what = f"old checkpoints in {self.folder} cannot be deleted (keep={keep}, found {len(infos)})"
        with failing_with_remedy(self.folder, what, note="The newest ones are untouched. "):
            moved = []
            for info in doomed:
                moved.append(info.path.rename(temporary_path(info.path, "pruned")))
            # The new names must be on the disk before files are deleted: otherwise a power cut could leave half of one.
            flush_folder(self.folder)
            for aside in moved:
                shutil.rmtree(aside)
        self._written.difference_update(info.path for info in doomed)
        return doomed

    def clean(self) -> builtins.list[Path]:
        """Remove the leftovers of writers that died; see `remove_leftovers`. Call it before the first write."""
        return remove_leftovers(self.folder)


def _is_good(store: CheckpointStore, info: CheckpointInfo) -> bool:
    try:
        store.verify(info)
    except CorruptCheckpointError:
        return False
    return True
