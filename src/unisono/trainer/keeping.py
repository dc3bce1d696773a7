"""The directory of a run: finding the checkpoint to resume from, and writing new ones when they are due.

Rank 0 alone touches the directory; the others get what it read as bytes. So the ranks need no shared file system.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor

from unisono.comm import World
from unisono.errors import CheckpointError
from unisono.state.policy import Checkpoints, is_due
from unisono.state.store import CheckpointInfo, Store, parse
from unisono.state.writer import BackgroundWriter
from unisono.watch import EventLog

__all__ = ["Found", "Keeper", "Resume"]

Resume = Literal["auto", "never", "must"]
Snapshot = tuple[dict[str, dict[str, Tensor]], dict[str, Any]]


class Found(NamedTuple):
    """A checkpoint to resume from, as every rank gets it."""

    source: str
    groups: dict[str, dict[str, Tensor]]
    document: dict[str, Any]
    warnings: list[str]


class Keeper:
    """Keeps the checkpoints of one run. Without a directory it keeps nothing."""

    def __init__(self, directory: Path | None, policy: Checkpoints, world: World) -> None:
        self._directory, self._policy, self._world = directory, policy, world
        self._store = None if directory is None else Store(directory / "checkpoints")
        self._writer: BackgroundWriter | None = None
        self._log = EventLog()
        self._last_steps = 0
        self._last_s = time.monotonic()

    def find(self, resume: Resume) -> Found | None:
        """Read the newest good checkpoint on rank 0 and give it to all ranks. Every rank must call it.

        Raises: CheckpointError if there is none and resume="must", if there is one and resume="never", if all are
            damaged, or if the directory cannot be used.
        """
        if self._store is None:
            if resume == "must":
                raise ValueError('resume="must" needs the directory of the run: pass directory=...')
            return None
        packed = self._world.broadcast_bytes(lambda: self._read_packed(resume))
        head, _, body = packed.partition(b"\n")
        header = json.loads(head)
        if "error" in header:
            raise CheckpointError(header["error"])
        if header["source"] is None:
            return None
        files, offset = {}, 0
        for name, nbytes in header["files"]:
            files[name] = body[offset : offset + nbytes]
            offset += nbytes
        groups, document = parse(files)
        assert isinstance(document, dict)
        return Found(header["source"], groups, document, header["warnings"])

    def begin(self, log: EventLog, *, total_steps: int) -> None:
        """Start to count the steps and the time since the last checkpoint."""
        self._log = log
        self._last_steps, self._last_s = total_steps, time.monotonic()
        if self._store is not None and self._world.rank == 0:
            self._writer = BackgroundWriter(self._store, self._policy.keep, self._on_written)

    def save_if_due(self, total_steps: int, capture: Callable[[], Snapshot], *, epoch_ended: bool = False) -> None:
        """Write a checkpoint in the background if the policy asks for one now."""
        since_steps, since_s = total_steps - self._last_steps, time.monotonic() - self._last_s
        if is_due(self._policy, steps_since=since_steps, seconds_since=since_s, epoch_ended=epoch_ended):
            self.save(total_steps, capture)

    def save(self, total_steps: int, capture: Callable[[], Snapshot]) -> None:
        """Write a checkpoint in the background, now.

        A disk that is full does not end a run: what failed before is told as a warning event, and this state, the newer
        one, is tried instead.
        """
        self._last_steps, self._last_s = total_steps, time.monotonic()
        if self._writer is None:
            return
        error = self._writer.wait()
        if error is not None:
            self._log.emit("warning", message=f"checkpoint not written: {error}")
        groups, document = capture()
        self._writer.submit(total_steps, groups, document)

    def finish(self, total_steps: int, capture: Callable[[], Snapshot]) -> None:
        """Write what is newer than the last checkpoint, and wait until it is on disk.

        Raises: CheckpointError if it cannot be written: the end of a run would be lost without a word.
        """
        if self._writer is None:
            return
        error = self._writer.wait()
        if total_steps > self._last_steps or error is not None:
            self.save(total_steps, capture)
            error = self._writer.wait()
        if error is not None:
            raise error

    def rescue(self, total_steps: int, capture: Callable[[], Snapshot]) -> None:
        """Write what is newer than every checkpoint, in this thread, while the process ends. A failure is only told."""
        if self._store is None or self._writer is None or total_steps <= self._last_steps:
            return
        self._writer.wait()
        if any(info.step >= total_steps for info in self._store.list()):
            return  # A later trainer of this process went on from here.
        started_s = time.monotonic()
        try:
            groups, document = capture()
            info = self._store.write(total_steps, groups, document)
            self._store.prune(self._policy.keep)
        except CheckpointError as error:
            self._log.emit("warning", message=f"checkpoint not written: {error}")
        else:
            self._on_written(info, time.monotonic() - started_s)

    def _on_written(self, info: CheckpointInfo, seconds: float) -> None:
        self._log.emit(
            "checkpoint", path=str(info.path), total_steps=info.step, nbytes=info.nbytes, seconds=round(seconds, 3)
        )

    def _read_packed(self, resume: Resume) -> bytes:
        """Read a checkpoint as one line of JSON and then the bytes of its files; an error as a line alone."""
        try:
            header, files = self._read(resume)
        except CheckpointError as error:
            header, files = {"error": str(error)}, {}
        return b"\n".join([json.dumps(header).encode(), b"".join(files.values())])

    def _read(self, resume: Resume) -> tuple[dict[str, Any], dict[str, bytes]]:
        store, directory = self._store, self._directory
        assert store is not None
        assert directory is not None
        try:
            store.folder.mkdir(parents=True, exist_ok=True)
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
        info, damaged = store.newest_good()
        if info is None and damaged:
            raise CheckpointError(
                f"all {len(damaged)} checkpoints in {directory} are damaged; the newest: {damaged[0]} Remove them to "
                "start anew, or restore them from a copy."
            )
        if info is None:
            if resume == "must":
                raise CheckpointError(f'{directory} holds no checkpoint, and resume="must": check the path')
            return {"source": None}, {}
        files = store.read(info)
        warnings = [f"{error} Resuming from step {info.step} instead." for error in damaged]
        sizes = [(name, len(content)) for name, content in files.items()]
        return {"source": str(info.path), "files": sizes, "warnings": warnings}, files
