"""Checkpoints of a run on disk: a folder each, whole or not there, and every byte checked before it is used.

    step-000000120/
        manifest.json       what belongs here: each file's size and SHA-256; written last; carries its own SHA-256
        model.safetensors   one file for each group of tensors, in the open safetensors format
        state.json          all that is not a tensor

A checkpoint is written into a `.tmp-…` folder beside the others, flushed to the disk, then renamed: a crash at any
moment leaves the older checkpoints as they were. Nothing is read with pickle and no file is executed. One process
writes at a time (rank 0); any number may read. Start reading at `Store.write` and `parse`.
"""

from __future__ import annotations

import builtins  # inside Store, `list` is its method
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.codec import Json, Piece, lay_out, rebuild, render
from unisono.state.files import Entry, checked, flush_folder, is_locked, locked, make_folder, remedy, write_file
from unisono.state.manifest import (
    GROUP,
    MANIFEST,
    STATE,
    SUFFIX,
    manifest_of,
    parse_manifest,
    read_manifest,
    render_manifest,
)

__all__ = ["CheckpointInfo", "Store", "parse"]

_STEP = re.compile(r"step-([0-9]{9,})")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """Where a checkpoint is. Says nothing about whether it is good: `Store.verify` does."""

    path: Path
    """Its folder."""
    step: int
    """The step it was made at, by the folder's name."""
    nbytes: int
    """Size of its files, all together."""


class Store:
    """The folder in which the checkpoints of one run lie, a `step-…` folder each; other files are left alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        # Written by this process and flushed: `prune` need not read them to know that they are good.
        self._written: set[Path] = set()

    def write(self, step: int, groups: Mapping[str, Mapping[str, Tensor]], document: Json) -> CheckpointInfo:
        """Write a checkpoint and return when it is safe on the disk.

        Not a collective: one rank writes. Tensors that see the same memory are stored once. Tensors that are not
        contiguous or not on the CPU are copied one at a time. A checkpoint of the same step is replaced, whatever it
        holds: a resumed run that comes by again may have fallen back because that one was damaged. The old one stays
        until the new one is complete.
        Raises: CheckpointError with the reason, the bytes needed and free, and the remedy; the checkpoints that were
            there are untouched and nothing else is left. TypeError or ValueError if the step, a group's name or the
            document is not what it must be.
        """
        if step < 0:
            raise ValueError(f"step={step} must not be negative")
        final = self.folder / f"step-{step:09d}"
        files: list[tuple[str, list[Piece]]] = []
        described: dict[str, Json] = {}
        for group, tensors in groups.items():
            if not GROUP.fullmatch(group):
                raise ValueError(f"group name {group!r}: use letters, digits, '_' and '-': it is part of a file's name")
            pieces, described[group] = lay_out(tensors, group)
            files.append((group + SUFFIX, pieces))
        files.append((STATE, [render(document)]))
        needed = sum(_nbytes(piece) for _, pieces in files for piece in pieces)

        work = self.folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}-{final.name}"
        doing = "creating the folder"
        try:
            make_folder(self.folder)
            work.mkdir()
            with locked(work):
                entries: list[Entry] = []
                for name, pieces in files:
                    doing = f"writing {name}"
                    entries.append(write_file(work / name, pieces))
                doing = f"writing {MANIFEST}"
                manifest = write_file(work / MANIFEST, [render_manifest(step, entries, described)])
                flush_folder(work)
                doing = f"renaming it to {final.name}"
                self._put(work, final)
        except OSError as error:
            shutil.rmtree(work, ignore_errors=True)  # before the free space is read: half a checkpoint is no use
            raise CheckpointError(self._explain(step, needed, doing, error)) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)  # not there any more if all went well
        self._written.add(final)
        nbytes = sum(entry.nbytes for entry in [*entries, manifest])
        return CheckpointInfo(path=final, step=step, nbytes=nbytes)

    def list(self) -> builtins.list[CheckpointInfo]:
        """List the checkpoints, newest first, by name: damaged ones too, so that they can be named.

        Raises: CheckpointError if the folder cannot be read; a folder that does not exist holds none.
        """
        infos: list[CheckpointInfo] = []
        try:
            for path in self.folder.iterdir():
                found = _STEP.fullmatch(path.name)
                if not found or path.name != f"step-{int(found[1]):09d}" or not path.is_dir():
                    continue
                with suppress(FileNotFoundError):  # pruned while we look
                    nbytes = sum(file.stat().st_size for file in path.iterdir())
                    infos.append(CheckpointInfo(path=path, step=int(found[1]), nbytes=nbytes))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"the checkpoints in {self.folder} cannot be listed: {error}. {remedy(error, self.folder)}"
            ) from error
        return sorted(infos, key=lambda info: info.step, reverse=True)

    def verify(self, info: CheckpointInfo) -> None:
        """Read a checkpoint once and compare every byte's hash with its manifest; constant memory.

        Files that the manifest does not name are ignored: they are never read.
        Raises: CorruptCheckpointError naming the file, and what was expected and found.
        """
        for entry in manifest_of(info.path).files:
            for _ in checked(info.path / entry.name, entry):
                pass

    def newest_good(self) -> tuple[CheckpointInfo | None, builtins.list[CorruptCheckpointError]]:
        """Find the newest checkpoint that is whole, and what is wrong with each newer one.

        (None, []) means that there is none; (None, errors) that all are damaged, which a caller should not mistake for
        a fresh start. Cost: reads each checkpoint up to the first good one.
        """
        errors: list[CorruptCheckpointError] = []
        for info in self.list():
            try:
                self.verify(info)
            except CorruptCheckpointError as error:
                errors.append(error)
            else:
                return info, errors
        return None, errors

    def read(self, info: CheckpointInfo) -> dict[str, bytes]:
        """Read a checkpoint's files, manifest included, and check them in the same pass. `parse` rebuilds the values.

        Bytes, so that the rank that has the disk can send them to the others. Memory: the size of the checkpoint,
        and of its largest file once more if that is above 2 GiB.
        Raises: CorruptCheckpointError naming the file, and what was expected and found.
        """
        files = {MANIFEST: read_manifest(info.path)}
        for entry in parse_manifest(files[MANIFEST], str(info.path), info.path.name).files:
            # In one piece where the system gives it (2 GiB at a time on Linux): joining pieces costs the memory twice.
            pieces = [*checked(info.path / entry.name, entry, at_once=max(entry.nbytes, 1))]
            files[entry.name] = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return files

    def prune(self, keep: int) -> builtins.list[CheckpointInfo]:
        """Delete all but the newest `keep` checkpoints, and return those deleted.

        The newest good one always stays, even where `keep` newer ones are damaged; where none is good, none is
        deleted. A reader sees each checkpoint whole or not at all. Cost: reads nothing if this store wrote the newest.
        Raises: CheckpointError if one cannot be deleted.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: the newest checkpoint is never deleted")
        infos = self.list()
        if len(infos) <= keep:
            return []
        good = next((info for info in infos if info.path in self._written or _is_good(self, info)), None)
        if good is None:
            return []
        doomed = [info for info in infos[keep:] if info.path != good.path]
        try:
            moved = []
            for info in doomed:
                aside = self.folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}-pruned-{info.path.name}"
                info.path.rename(aside)
                moved.append(aside)
            # The new names reach the disk before the files go: else a power cut could bring back half a checkpoint.
            flush_folder(self.folder)
            for aside in moved:
                shutil.rmtree(aside)
        except OSError as error:
            raise CheckpointError(
                f"old checkpoints in {self.folder} cannot be deleted (keep={keep}, found {len(infos)}): {error}. The "
                f"newest ones are untouched. {remedy(error, self.folder)}"
            ) from error
        self._written.difference_update(info.path for info in doomed)
        return doomed

    def clean(self) -> builtins.list[Path]:
        """Remove what writers that died left behind, and return the folders removed. Call it before the first write.

        A checkpoint that was moved aside to be replaced, when the writer died in between, is put back. A folder whose
        writer lives is left alone: its writer holds a lock on it, which the kernel drops with the process.
        Raises: CheckpointError if a leftover cannot be removed.
        """
        removed: list[Path] = []
        try:
            for path in sorted(self.folder.glob(".tmp-*-step-*")):
                final = self.folder / path.name[path.name.index("step-") :]
                if not path.is_dir() or not _STEP.fullmatch(final.name) or is_locked(path):
                    continue
                if "-replaced-" in path.name and not final.exists():
                    path.rename(final)
                    flush_folder(self.folder)
                else:
                    shutil.rmtree(path)
                    removed.append(path)
        except OSError as error:
            raise CheckpointError(
                f"what a dead writer left in {self.folder} cannot be removed: {error}. {remedy(error, self.folder)}"
            ) from error
        return removed

    def _put(self, work: Path, final: Path) -> None:
        """Give a complete checkpoint its name. The rename is the moment from which it exists."""
        if final.exists() and not final.is_dir():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        aside: Path | None = None
        if final.exists():
            aside = self.folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}-replaced-{final.name}"
            final.rename(aside)
        try:
            work.rename(final)
        except OSError:
            if aside is not None:
                aside.rename(final)
            raise
        flush_folder(self.folder)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)  # if it stays, `clean` takes it at the next start

    def _explain(self, step: int, needed: int, doing: str, error: OSError) -> str:
        try:
            there = next(path for path in [self.folder, *self.folder.absolute().parents] if path.exists())
            free = f"{shutil.disk_usage(there).free:,} bytes are free there"
        except OSError as no_answer:
            free = f"the free space is unknown ({no_answer})"
        reason = f"[Errno {error.errno}] {error.strerror}" if error.errno else str(error)
        return (
            f"the checkpoint of step {step} was not written to {self.folder}: {reason}, while {doing}. It needs "
            f"{needed:,} bytes and {free}. Older checkpoints are untouched. {remedy(error, self.folder)}"
        )


def parse(files: Mapping[str, bytes]) -> tuple[dict[str, dict[str, Tensor]], Json]:
    """Rebuild the groups of tensors and the document from the bytes that `Store.read` gave. Pure; on any rank.

    Tensors are new CPU memory. Names that were stored once because they saw the same memory share a tensor again.
    Memory: the tensors, beside the bytes.
    Raises: CorruptCheckpointError naming the file that does not hold what a checkpoint must hold.
    """
    manifest = parse_manifest(files.get(MANIFEST, b""), "checkpoint", None)
    for entry in manifest.files:
        if entry.name not in files or len(files[entry.name]) != entry.nbytes:
            found = f"{len(files[entry.name]):,} bytes" if entry.name in files else "no such file"
            raise CorruptCheckpointError(f"{entry.name}: expected {entry.nbytes:,} bytes, found {found}.")
    try:
        document: Json = json.loads(files[STATE])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{STATE} is not JSON: {error}. Take an older checkpoint.") from error
    groups = {
        group: rebuild(files[group + SUFFIX], described, group + SUFFIX) for group, described in manifest.groups.items()
    }
    return groups, document


def _nbytes(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece[1].numel() * piece[1].element_size()


def _is_good(store: Store, info: CheckpointInfo) -> bool:
    try:
        store.verify(info)
    except CorruptCheckpointError:
        return False
    return True
