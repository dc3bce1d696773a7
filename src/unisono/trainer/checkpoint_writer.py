"""Writes the checkpoints of a run on rank 0, one at a time, and records the best one.

`checkpointing` decides when. A thread writes (`state.writer`) while the run goes on; it is waited for before the next
write, at the end of the run, and where a user asks for it. Start reading at `CheckpointWriter.submit`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from unisono.errors import CheckpointError
from unisono.state.checkpoint_store import CheckpointInfo
from unisono.state.policy import Checkpoints
from unisono.state.writer import BackgroundWriter
from unisono.trainer.best_checkpoint import BestCheckpoint
from unisono.trainer.checkpoint_events import CheckpointEvents
from unisono.trainer.host_parts import HostParts, Occasion, Snapshot
from unisono.trainer.run_directory import RunDirectory
from unisono.trainer.save_rule import Place

__all__ = ["CheckpointWriter"]


class CheckpointWriter:
    """Writes checkpoints to the directory of a run.

    Args:
        directory: The directory.
        policy: How many checkpoints to keep, and which metric decides on the best one.
        events: Tells of the checkpoints.
        hosts: Writes parts of checkpoints with other hosts, if they share the directory.
        apart: By group and name, tensors in files, which are too large to be copied: ranks wait while they are written.
    """

    def __init__(
        self,
        directory: RunDirectory,
        policy: Checkpoints,
        events: CheckpointEvents,
        hosts: HostParts,
        apart: Mapping[tuple[str, str], Tensor],
    ) -> None:
        self._directory, self._policy, self._events = directory, policy, events
        self._hosts, self._apart = hosts, apart
        self._thread = BackgroundWriter(directory.store, policy.keep, self._on_written)
        self.best = BestCheckpoint(directory.store, policy, events.warn)
        """The best checkpoint."""
        self._is_written = True
        """False while a checkpoint is being written, and after that has failed."""

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint is being written."""
        return self._thread.is_writing

    @property
    def has_failed(self) -> bool:
        """True if the last checkpoint could not be written."""
        return not (self._is_written or self._thread.is_writing)

    def start(self, total_steps: int, write: Callable[[], CheckpointInfo]) -> None:
        """Write a checkpoint in the background by a function. No write may be in progress.

        Args:
            total_steps: Steps done in all.
            write: Writes it, and returns when it is safe on the disk. Called in a thread.
        """
        self._is_written = False
        self._thread.start(total_steps, write)

    def submit(self, place: Place, capture: Callable[[], Snapshot], occasion: Occasion | None = None) -> None:
        """Write a checkpoint in the background, after the one that is being written; see `Checkpointing.submit`."""
        error = self.wait()
        if error is not None:
            self._events.warn(f"checkpoint not written: {error}")
        write: Callable[[], CheckpointInfo] | None = None
        if occasion is not None and not self._hosts.has_failed:
            write = self._hosts.begin(occasion, capture)
        self._hosts.has_failed = False
        groups, document = ({}, {}) if write is not None else capture()
        self.best.writing(place[2])
        if write is not None:
            self.start(place[2], write)
        elif self._apart:
            self.start(place[2], partial(self._directory.store.write, place[2], groups, document))
            self._thread.join()
        else:
            self._is_written = False
            self._thread.submit(place[2], groups, document)

    def rescue(self, place: Place, capture: Callable[[], Snapshot], *, last: Place) -> None:
        """Write a state newer than the last checkpoint in this thread, while the process ends.

        Args:
            place: The place of the run.
            capture: Returns its state.
            last: The place of the last checkpoint.
        """
        error = self.wait()
        if error is not None:
            self._events.warn(f"checkpoint not written: {error}")
        elif place == last:
            return
        started_s = time.monotonic()
        try:
            self._directory.hold(last[2])
            groups, document = capture()
            self.best.writing(place[2])
            info = self._directory.store.write(place[2], groups, document)
            self._on_written(info, time.monotonic() - started_s)
            self._directory.store.prune(self._policy.keep)
        except CheckpointError as error:
            self._events.warn(f"checkpoint not written: {error}")
        else:
            self._events.raise_for_listener()

    def join(self) -> None:
        """Wait until no write is in progress, while other ranks wait for this one."""
        with self._hosts.awaited():
            self._thread.join()

    def wait(self) -> CheckpointError | None:
        """Wait as `join` does, and return the error of the last write, once."""
        self.join()
        error = self._thread.poll()
        self.best.settle(error)
        return error

    def settle(self) -> None:
        """Wait as `join` does, and record the best checkpoint if it is on the disk."""
        self.join()
        self.best.record_written()

    def _on_written(self, info: CheckpointInfo, seconds: float) -> None:
        self.best.written(info.step)
        self._is_written = True
        self._events.tell_in_background(info, seconds)
