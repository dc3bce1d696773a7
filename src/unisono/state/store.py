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
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import Tensor

from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.state.codec import Json, Piece, lay_out, rebuild, render
from unisono.state.digest import exact, memory

__all__ = ["CheckpointInfo", "Store", "parse"]

_FORMAT = 1
_MANIFEST = "manifest.json"
_STATE = "state.json"
_SUFFIX = ".safetensors"
_STEP = re.compile(r"step-([0-9]{9,})")
_GROUP = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
# Pieces that stay in the CPU's cache between being written and being hashed: one trip through memory, not two.
_CHUNK = 1 << 20
_MANIFEST_LIMIT = 64 << 20


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
            if not _GROUP.fullmatch(group):
                raise ValueError(f"group name {group!r}: use letters, digits, '_' and '-': it is part of a file's name")
            pieces, described[group] = lay_out(tensors, group)
            files.append((group + _SUFFIX, pieces))
        files.append((_STATE, [render(document)]))
        needed = sum(_nbytes(piece) for _, pieces in files for piece in pieces)

        work = self.folder / f".tmp-{os.getpid()}-{secrets.token_hex(4)}-{final.name}"
        doing = "creating the folder"
        try:
            _make_folder(self.folder)
            work.mkdir()
            with _locked(work):
                entries: list[_Entry] = []
                for name, pieces in files:
                    doing = f"writing {name}"
                    entries.append(_write_file(work / name, pieces))
                doing = f"writing {_MANIFEST}"
                manifest = _write_file(work / _MANIFEST, [_render_manifest(step, entries, described)])
                _flush_folder(work)
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
                f"the checkpoints in {self.folder} cannot be listed: {error}. {_remedy(error, self.folder)}"
            ) from error
        return sorted(infos, key=lambda info: info.step, reverse=True)

    def verify(self, info: CheckpointInfo) -> None:
        """Read a checkpoint once and compare every byte's hash with its manifest; constant memory.

        Files that the manifest does not name are ignored: they are never read.
        Raises: CorruptCheckpointError naming the file, and what was expected and found.
        """
        for entry in _manifest_of(info.path).files:
            for _ in _checked(info.path / entry.name, entry):
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
        files = {_MANIFEST: _read_manifest(info.path)}
        for entry in _parse_manifest(files[_MANIFEST], str(info.path), info.path.name).files:
            # In one piece where the system gives it (2 GiB at a time on Linux): joining pieces costs the memory twice.
            pieces = [*_checked(info.path / entry.name, entry, at_once=max(entry.nbytes, 1))]
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
            _flush_folder(self.folder)
            for aside in moved:
                shutil.rmtree(aside)
        except OSError as error:
            raise CheckpointError(
                f"old checkpoints in {self.folder} cannot be deleted (keep={keep}, found {len(infos)}): {error}. The "
                f"newest ones are untouched. {_remedy(error, self.folder)}"
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
                if not path.is_dir() or not _STEP.fullmatch(final.name) or _is_locked(path):
                    continue
                if "-replaced-" in path.name and not final.exists():
                    path.rename(final)
                    _flush_folder(self.folder)
                else:
                    shutil.rmtree(path)
                    removed.append(path)
        except OSError as error:
            raise CheckpointError(
                f"what a dead writer left in {self.folder} cannot be removed: {error}. {_remedy(error, self.folder)}"
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
        _flush_folder(self.folder)
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
            f"{needed:,} bytes and {free}. Older checkpoints are untouched. {_remedy(error, self.folder)}"
        )


def parse(files: Mapping[str, bytes]) -> tuple[dict[str, dict[str, Tensor]], Json]:
    """Rebuild the groups of tensors and the document from the bytes that `Store.read` gave. Pure; on any rank.

    Tensors are new CPU memory. Names that were stored once because they saw the same memory share a tensor again.
    Memory: the tensors, beside the bytes.
    Raises: CorruptCheckpointError naming the file that does not hold what a checkpoint must hold.
    """
    manifest = _parse_manifest(files.get(_MANIFEST, b""), "checkpoint", None)
    for entry in manifest.files:
        if entry.name not in files or len(files[entry.name]) != entry.nbytes:
            found = f"{len(files[entry.name]):,} bytes" if entry.name in files else "no such file"
            raise CorruptCheckpointError(f"{entry.name}: expected {entry.nbytes:,} bytes, found {found}.")
    try:
        document: Json = json.loads(files[_STATE])
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{_STATE} is not JSON: {error}. Take an older checkpoint.") from error
    groups = {
        group: rebuild(files[group + _SUFFIX], described, group + _SUFFIX)
        for group, described in manifest.groups.items()
    }
    return groups, document


# ---------------------------------------------------------------------------------------------------------------------
# The files of a checkpoint, written.


def _render_manifest(step: int, entries: list[_Entry], groups: dict[str, Json]) -> bytes:
    try:
        version = importlib.metadata.version("unisono")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        version = "unknown"
    return _seal(
        {
            "format": _FORMAT,
            "unisono": version,
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "step": step,
            "files": [asdict(entry) for entry in entries],
            "groups": groups,
        }
    )


def _seal(content: dict[str, Any]) -> bytes:
    """Render a manifest with its own hash at the end: it guards the others, and nothing else guards it."""
    body = json.dumps(content, indent=1).encode()
    return json.dumps({**content, "sha256": hashlib.sha256(body).hexdigest()}, indent=1).encode() + b"\n"


def _nbytes(piece: Piece) -> int:
    return len(piece) if isinstance(piece, bytes) else piece[1].numel() * piece[1].element_size()


def _write_file(path: Path, pieces: list[Piece]) -> _Entry:
    """Write a file, flush it to the disk, and describe it.

    The hash is of the bytes meant, taken on the way. Hashing the file instead would bless a bad write, and reading it
    back would come from the page cache: 0.15 s for 300 MB that say nothing about the disk. `verify` says it later.
    """
    sha = hashlib.sha256()
    nbytes = 0
    with path.open("xb") as file:
        for piece in pieces:
            view = memoryview(piece) if isinstance(piece, bytes) else memory(exact(piece[1], piece[0]))
            for start in range(0, len(view), _CHUNK):
                chunk = view[start : start + _CHUNK]
                file.write(chunk)
                sha.update(chunk)
            nbytes += len(view)
        file.flush()
        os.fsync(file.fileno())
    found = path.stat().st_size
    if found != nbytes:
        raise OSError(errno.EIO, f"{nbytes:,} bytes were written and the file has {found:,}", str(path))
    return _Entry(name=path.name, nbytes=nbytes, sha256=sha.hexdigest())


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network and FUSE file systems cannot flush a folder and say so; names there are as safe as they get.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock that says the writer lives. A process id would not: containers give the same one at every start."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # no locks on this file system: `clean` then relies on there being one writer
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _is_locked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _remedy(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free space or quota there, keep fewer checkpoints, or choose another directory."
    if error.errno == errno.EFBIG:
        return "Raise the limit on file sizes (`ulimit -f`), or choose a file system that holds files of this size."
    if error.errno == errno.EROFS:
        return "The file system is mounted read-only: choose another directory, or mount it for writing."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Give uid {os.geteuid()} the right to write there, or choose another directory."
    if error.errno in (errno.EEXIST, errno.ENOTDIR):
        return (
            f"A file is where a folder must be ({error.filename or folder}): move it away, or choose another directory."
        )
    return "Look at the disk and its mount, or choose another directory."


# ---------------------------------------------------------------------------------------------------------------------
# The files of a checkpoint, read. Whatever they say is checked before it is believed.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Manifest:
    step: int
    files: list[_Entry]
    groups: dict[str, dict[str, Any]]


def _manifest_of(folder: Path) -> _Manifest:
    return _parse_manifest(_read_manifest(folder), str(folder), folder.name)


def _read_manifest(folder: Path) -> bytes:
    path = folder / _MANIFEST
    return b"".join(
        _chunks(path, lambda size: size <= _MANIFEST_LIMIT, f"a manifest of up to {_MANIFEST_LIMIT:,} bytes")
    )


def _parse_manifest(data: bytes, where: str, folder_name: str | None) -> _Manifest:
    def corrupt(what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{where}: {_MANIFEST} {what}. Take an older checkpoint.")

    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"is not JSON ({len(data):,} bytes: {error}): it was cut off or changed") from error
    if not isinstance(content, dict):
        raise corrupt(f"holds a {type(content).__name__}, expected an object")
    if content.get("format") != _FORMAT:
        raise corrupt(
            f"has format {content.get('format')!r}, and this unisono reads {_FORMAT}: it is damaged, or comes from a "
            f"newer unisono (upgrade to read it)"
        )
    claimed = content.pop("sha256", None)
    # Rendered again and compared to the byte: a change in white space or in the case of a digit is a change too.
    if _seal(content) != data:
        found = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
        raise corrupt(f"was changed after it was written: expected sha256 {claimed}, found {found}")
    try:
        entries = [_Entry(**entry) for entry in content["files"]]
        manifest = _Manifest(step=content["step"], files=entries, groups=content["groups"])
        expected = {*(f"{group}{_SUFFIX}" for group in manifest.groups), _STATE}
        sound = all(type(entry.nbytes) is int and type(entry.sha256) is str for entry in entries)
        sound = sound and all(
            isinstance(group["names"], list)
            and isinstance(group["aliases"], dict)
            and isinstance(group["dtypes"], dict)
            for group in manifest.groups.values()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise corrupt(f"lacks what it must say: {type(error).__name__}: {error}") from error
    names = [entry.name for entry in entries]
    # A file's name comes from the file: it must not lead out of the folder.
    bad = [name for name in names if name != _STATE and not (isinstance(name, str) and _is_group_file(name))]
    if bad:
        raise corrupt(f"names {bad[0]!r}, which is not a file of a checkpoint; nothing was read from there")
    if not sound or len(names) != len(expected) or set(names) != expected:
        raise corrupt(f"lists the files {names}, expected {sorted(expected)} with a size and a hash each")
    if folder_name is not None and folder_name != f"step-{manifest.step:09d}":
        raise corrupt(f"is of step {manifest.step}, but the folder is {folder_name}: it was renamed or copied")
    return manifest


def _is_group_file(name: str) -> bool:
    return name.endswith(_SUFFIX) and _GROUP.fullmatch(name.removesuffix(_SUFFIX)) is not None


def _checked(path: Path, entry: _Entry, *, at_once: int = _CHUNK) -> Iterator[bytes]:
    """Yield a file's bytes in pieces; at the end raise CorruptCheckpointError if they are not those written."""
    sha = hashlib.sha256()
    for chunk in _chunks(path, lambda size: size == entry.nbytes, f"{entry.nbytes:,} bytes", at_once):
        sha.update(chunk)
        yield chunk
    if sha.hexdigest() != entry.sha256:
        raise CorruptCheckpointError(
            f"{path}: expected sha256 {entry.sha256}, found {sha.hexdigest()} in {entry.nbytes:,} bytes: the file was "
            f"changed or the disk is failing. Take an older checkpoint."
        )


def _chunks(path: Path, fits: Callable[[int], bool], expected: str, at_once: int = _CHUNK) -> Iterator[bytes]:
    try:
        # Without O_NONBLOCK a named pipe in the folder would wait for a writer for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(handle, "rb", buffering=0) as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise CorruptCheckpointError(f"{path}: expected a file, found {stat.filemode(status.st_mode)}.")
            if not fits(status.st_size):
                raise CorruptCheckpointError(
                    f"{path}: expected {expected}, found {status.st_size:,}: it was cut off or changed. Take an older "
                    f"checkpoint."
                )
            while chunk := file.read(at_once):
                yield chunk
    except OSError as error:
        raise CorruptCheckpointError(
            f"{path}: expected {expected}, but it cannot be read: [Errno {error.errno}] {error.strerror}. Take an "
            f"older checkpoint, or repair this one."
        ) from error


def _is_good(store: Store, info: CheckpointInfo) -> bool:
    try:
        store.verify(info)
    except CorruptCheckpointError:
        return False
    return True
