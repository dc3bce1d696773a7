"""The checkpoint from which a run continues: rank 0 reads it, checks it while reading, and sends it to all ranks.

Only rank 0 needs the disk. Start reading at `find`.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from unisono.collectives.world import World
from unisono.errors import CheckpointError
from unisono.job.ranks import local_world_size
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.durable_files import make_folder
from unisono.state.lock import DirectoryLock
from unisono.trainer.tensor_groups import TensorGroups, broadcast_groups

__all__ = ["Resume", "ResumedRun", "find"]

Resume = Literal["auto", "never", "must"]


class ResumedRun(NamedTuple):
    """The content of a run's directory, as every rank receives it."""

    source: str | None
    """The path of the checkpoint to continue from; None: there is none."""
    groups: dict[str, dict[str, Tensor]]
    document: dict[str, Any]
    warnings: list[str]


def find(world: World, directory: Path, store: CheckpointStore, lock: DirectoryLock, resume: Resume) -> ResumedRun:
    """Lock the directory of a run, read its newest good checkpoint on rank 0, and send it to all ranks.

    Every rank must call it. Memory: the tensors, once on each rank.

    Raises:
        CheckpointError: On all ranks, if the directory is in use or cannot be used, if there is no checkpoint and
            resume="must", if there is one and resume="never", if all are damaged, or if a rank of another host finds a
            newer one than rank 0.
    """
    if local_world_size() < world.size:
        _compare_hosts(world, directory, store)

    def read() -> tuple[dict[str, Any], TensorGroups]:
        """Read the checkpoint on rank 0, and return a description of its content or of the error, and its tensors."""
        try:
            return _read(directory, store, lock, resume)
        except CheckpointError as error:
            lock.release()
            return {"error": str(error)}, {}

    head, groups = broadcast_groups(world, read)
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


def _read(
    directory: Path, store: CheckpointStore, lock: DirectoryLock, resume: Resume
) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
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
    loaded, damaged = store.load_newest()
    warnings = [] if unlocked is None else [unlocked]
    if loaded is None and damaged:
        raise CheckpointError(
            f"all {len(damaged)} checkpoints in {directory} are damaged; the newest: {damaged[0]} Remove them to "
            "start anew, or restore them from a copy."
        )
    if loaded is None:
        if resume == "must":
            raise CheckpointError(f'{directory} holds no checkpoint, and resume="must": check the path')
        return {"source": None, "document": {}, "warnings": warnings}, {}
    warnings += [f"{error} Resuming from step {loaded.info.step} instead." for error in damaged]
    return {"source": str(loaded.info.path), "document": loaded.document, "warnings": warnings}, loaded.groups
