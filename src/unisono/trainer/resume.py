"""The checkpoint from which a run continues: rank 0 reads it, checks it while reading, and sends it to all ranks.

Only rank 0 needs the disk. But where all ranks see the same files, those of several hosts each read a share and send it
to the others, and those of a divided run each check a part, and read what they need later (`part_restoration`). Start
reading at `find`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from unisono.collectives.world import World
from unisono.errors import CheckpointError, CorruptCheckpointError
from unisono.job.ranks import local_world_size
from unisono.state.checkpoint_store import CheckpointInfo, CheckpointStore
from unisono.state.durable_files import make_folder
from unisono.state.lock import DirectoryLock
from unisono.state.open_checkpoint import OpenCheckpoint
from unisono.state.part_plan import even_claims
from unisono.state.tensor_file import TensorRange
from unisono.state.tensor_groups import TensorGroups, broadcast_groups, exchange_parts, forms_of, table_of

__all__ = ["Resume", "ResumedRun", "find"]

Resume = Literal["auto", "never", "must"]


class ResumedRun(NamedTuple):
    """The content of a run's directory, as every rank receives it."""

    source: str | None
    """The path of the checkpoint to continue from; None: there is none."""
    groups: dict[str, dict[str, Tensor]]
    document: dict[str, Any]
    warnings: list[str]
    checkpoint: OpenCheckpoint | None = None
    """The checkpoint, checked, of which each rank reads its part; None: `groups` has all tensors, or others read."""
    readers: Sequence[int] = ()
    """The ranks that read a checkpoint of which others may get a part."""
    forms: Mapping[str, Mapping[str, Tensor]] = {}
    """What that has by group and name, without values."""


def find(
    world: World,
    directory: Path,
    store: CheckpointStore,
    lock: DirectoryLock,
    resume: Resume,
    *,
    in_parts: bool = False,
    by_main: bool = False,
    owner: Callable[[str, str], int | None] | None = None,
    apart: Mapping[tuple[str, str], Tensor] | None = None,
) -> ResumedRun:
    """Lock the directory of a run, read its newest good checkpoint on rank 0, and send it to all ranks.

    Every rank must call it. Memory: the tensors, once on each rank; none with in_parts, if all see the same files.

    Args:
        world: The ranks.
        directory: The directory.
        store: Its checkpoints.
        lock: Its lock.
        resume: See `Trainer`.
        in_parts: Let ranks read what they need later, if they can: the run is divided.
        by_main: With in_parts: if they cannot, let rank 0 read that.
        owner: Returns the rank that alone needs a tensor, by group and name; None if all do. Others may get it, too.
        apart: By group and name, memory that all ranks share: rank 0 reads these tensors into it.

    Raises:
        CheckpointError: On all ranks, if the directory is in use or cannot be used, if there is no checkpoint and
            resume="must", if there is one and resume="never", if all are damaged, or if a rank of another host finds a
            newer one than rank 0.
    """
    has_hosts = local_world_size() < world.size
    if has_hosts:
        _compare_hosts(world, directory, store)
    begun: _Begun | None = None

    def begin() -> _Begun:
        """Lock the directory on rank 0, once."""
        nonlocal begun
        if begun is None:
            begun = _begin(directory, store, lock, resume)
        return begun

    def paths() -> bytes:
        try:
            return json.dumps([str(info.path.absolute()) for info in begin().checkpoints]).encode()
        except CheckpointError as error:
            lock.release()
            return json.dumps({"error": str(error)}).encode()

    if (in_parts and not by_main) or (world.size > 1 and (in_parts or owner is not None or (has_hosts and not apart))):
        head = json.loads(world.broadcast_bytes(paths))
        if "error" in head:
            raise CheckpointError(head["error"])
        work: Callable[[World, OpenCheckpoint], _Opened] = _Checked if in_parts else partial(_Shares, owner=owner)
        opened, damaged = _open_everywhere(world, [Path(path) for path in head], work)
        if opened is not None:
            warnings = [] if begun is None else begun.warnings
            warnings = warnings + [f"{error} Resuming from step {opened.step} instead." for error in damaged]
            return opened.resumed(warnings)
        if damaged:
            if world.rank == 0:
                lock.release()
            raise _all_damaged(directory, damaged)
        if by_main:
            return _opened_by_main(world, directory, lock, begin)

    def read() -> tuple[dict[str, Any], TensorGroups]:
        """Read the checkpoint on rank 0, and return a description of its content or of the error, and its tensors."""
        try:
            return _read(directory, store, begin(), apart)
        except CheckpointError as error:
            lock.release()
            return {"error": str(error)}, {}

    head, groups = broadcast_groups(world, read, apart=apart)
    if "error" in head:
        raise CheckpointError(head["error"])
    return ResumedRun(head["source"], groups, head["document"], head["warnings"])


def _compare_hosts(world: World, directory: Path, store: CheckpointStore) -> None:
    """Refuse to begin where rank 0 lacks what another host has: the run would start anew, or from an old checkpoint.

    Hosts may share a file system or not; if they do, all find the same.
    """
    try:
        listed = store.list()
    except CheckpointError:  # rank 0 reports its own later; what others cannot read, they would not use
        listed = []
    found = world.gather((listed[0].step if listed else 0, socket.gethostname()), "Trainer finding its run")
    (step, host), newest = found[0], max(range(len(found)), key=lambda rank: found[rank][0])
    if found[newest][0] > step:
        there, other = found[newest]
        has = f"up to step {step}" if step else "none"
        raise CheckpointError(
            f"rank {newest} on host {other} finds checkpoints up to step {there} in {directory}, and rank 0 on host "
            f"{host}, which reads for all, {has}: start rank 0 on {other} (with `unisono run`, as --node-rank 0), or "
            f"copy the directory to {host}."
        )


class _Begun(NamedTuple):
    """The contents of a directory that rank 0 has locked."""

    checkpoints: list[CheckpointInfo]
    """All of them, newest first, also damaged ones."""
    warnings: list[str]


def _begin(directory: Path, store: CheckpointStore, lock: DirectoryLock, resume: Resume) -> _Begun:
    try:
        make_folder(store.folder)
        unlocked = lock.acquire()
    except OSError as error:
        raise CheckpointError(
            f"the directory {directory} cannot be used for this run: {error.strerror} ({error.filename}). Give "
            "Trainer a directory that can be written to, or directory=None to keep nothing."
        ) from error
    store.clean()
    listed = store.list()
    if resume == "never" and listed:
        raise CheckpointError(
            f'{directory} already holds a run, up to step {listed[0].step}, and resume="never": choose another '
            'directory, remove this one, or let resume="auto" continue it.'
        )
    if resume == "must" and not listed:
        raise CheckpointError(f'{directory} holds no checkpoint, and resume="must": check the path')
    return _Begun(listed, [] if unlocked is None else [unlocked])


def _read(
    directory: Path, store: CheckpointStore, begun: _Begun, into: Mapping[tuple[str, str], Tensor] | None
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    loaded, damaged = store.load_newest(into=into)
    if loaded is None and damaged:
        raise _all_damaged(directory, [str(error) for error in damaged])
    if loaded is None:
        return {"source": None, "document": {}, "warnings": begun.warnings}, {}
    warnings = begun.warnings + [f"{error} Resuming from step {loaded.info.step} instead." for error in damaged]
    return {"source": str(loaded.info.path), "document": loaded.document, "warnings": warnings}, loaded.groups


def _opened_by_main(world: World, directory: Path, lock: DirectoryLock, begin: Callable[[], _Begun]) -> ResumedRun:
    """Let rank 0 check and open the newest good checkpoint, and tell all ranks what it has."""
    checkpoint: OpenCheckpoint | None = None

    def describe() -> bytes:
        nonlocal checkpoint
        damaged: list[str] = []
        try:
            begun = begin()
            for info in begun.checkpoints:
                try:
                    checkpoint = OpenCheckpoint(info.path)
                    checkpoint.verify()
                    forms = {group: table_of(checkpoint.group(group).forms) for group in checkpoint.groups}
                    head = {"source": str(info.path), "document": checkpoint.document(), "forms": forms}
                    break
                except CorruptCheckpointError as error:
                    damaged.append(str(error))
            else:
                if damaged:
                    raise _all_damaged(directory, damaged)
                head = {"source": None, "document": {}, "forms": {}}
        except CheckpointError as error:
            lock.release()
            return json.dumps({"error": str(error)}).encode()
        step = checkpoint.step if checkpoint is not None else 0
        warnings = begun.warnings + [f"{error} Resuming from step {step} instead." for error in damaged]
        return json.dumps({**head, "warnings": warnings}).encode()

    head = json.loads(world.broadcast_bytes(describe))
    if "error" in head:
        raise CheckpointError(head["error"])
    forms = {group: forms_of(table) for group, table in head["forms"].items()}
    return ResumedRun(head["source"], {}, head["document"], head["warnings"], checkpoint, [0], forms)


def _all_damaged(directory: Path, damaged: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"all {len(damaged)} checkpoints in {directory} are damaged; the newest: {damaged[0]} Remove them to "
        "start anew, or restore them from a copy."
    )


class _Opened(Protocol):
    """A checkpoint that all ranks see, and of which this one has read or checked a part.

    To make one raises CheckpointError if it is damaged.
    """

    step: int

    def resumed(self, warnings: list[str]) -> ResumedRun:
        """Return the run. Every rank must call it, once none has found damage."""


class _Checked:
    """A checkpoint of which this rank has checked a part of the bytes; see `_Opened`."""

    def __init__(self, world: World, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint, self.step, self._readers = checkpoint, checkpoint.step, range(world.size)
        self._document = checkpoint.document()
        checkpoint.verify(part=world.rank, parts=world.size)
        self._forms = {group: checkpoint.group(group).forms for group in checkpoint.groups}

    def resumed(self, warnings: list[str]) -> ResumedRun:
        """Return the run, of which each rank reads what it needs later."""
        assert isinstance(self._document, dict)
        source = str(self._checkpoint.path)
        return ResumedRun(source, {}, self._document, warnings, self._checkpoint, self._readers, self._forms)


class _Shares:
    """A checkpoint of which this rank has read and checked a share; see `_Opened`.

    Memory: all tensors, but for those that another rank alone needs.

    Args:
        world: The ranks.
        checkpoint: The checkpoint.
        owner: See `find`.
    """

    def __init__(
        self, world: World, checkpoint: OpenCheckpoint, *, owner: Callable[[str, str], int | None] | None
    ) -> None:
        self._world, self._source, self.step = world, str(checkpoint.path), checkpoint.step
        self._document = checkpoint.document()
        self._groups: TensorGroups = {}
        self._parts: list[list[Tensor]] = [[] for _ in range(world.size)]
        """What each rank reads, of tensors in memory here."""
        for group in checkpoint.groups:
            file = checkpoint.group(group)
            owners = {name: None if owner is None else owner(group, name) for name in file.forms}
            own_forms = {name: form for name, form in file.forms.items() if owners[name] in (None, world.rank)}
            # Tied names have one form.
            made = {id(form): torch.empty(form.shape, dtype=form.dtype) for form in own_forms.values()}
            self._groups[group] = {name: made[id(form)] for name, form in own_forms.items()}
            ranges = [
                TensorRange(name, 0, self._groups[group][name].view(-1))
                for name in file.stored
                if owners[name] == world.rank
            ]
            shared = {name: file.forms[name] for name in file.stored if owners[name] is None}
            for rank, claims in enumerate(even_claims(shared, world.size)):
                for claim in claims:
                    own = self._groups[group][claim.name].view(-1)[claim.start : claim.stop]
                    self._parts[rank].append(own)
                    if rank == world.rank:
                        ranges.append(TensorRange(claim.name, claim.start, own))
            file.read(ranges)

    def resumed(self, warnings: list[str]) -> ResumedRun:
        """Get the shares of the others, and return the run. Traffic: all tensors."""
        assert isinstance(self._document, dict)
        exchange_parts(self._world, self._parts)
        return ResumedRun(self._source, self._groups, self._document, warnings)


def _open_everywhere(
    world: World, paths: Sequence[Path], work: Callable[[World, OpenCheckpoint], _Opened]
) -> tuple[_Opened | None, list[str]]:
    """Return what each rank makes of the newest good checkpoint, and the errors of newer ones. Every rank must call it.

    Args:
        world: The ranks.
        paths: The checkpoints, newest first.
        work: Reads and checks the part of this rank.

    Returns:
        None and no errors if there are none, or a rank does not see the files of rank 0. None and errors if all are
        damaged.
    """
    damaged: list[str] = []
    for path in paths:
        checkpoint, error = None, ""
        try:
            checkpoint = OpenCheckpoint(path)
        except CheckpointError as raised:
            error = str(raised)
        everyone = world.gather((error, checkpoint and checkpoint.digest), "Trainer resuming")
        error, digest = everyone[0]
        if error:
            damaged.append(error)
            continue
        if checkpoint is None or any(other != digest for _, other in everyone):
            return None, []
        opened: _Opened | None = None
        try:
            opened = work(world, checkpoint)
        except CheckpointError as raised:
            error = str(raised)
        errors = [each for each in world.gather(error, "Trainer resuming") if each]
        if not errors:
            return opened, damaged
        damaged.append(errors[0])
    return None, damaged
