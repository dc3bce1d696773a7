"""Writing of checkpoints while training continues.

`BackgroundWriter.submit` copies the tensors, which takes as long as a memory copy, and returns; a thread writes the
copy to disk. Cost: memory for one more copy of the state during a write. One write at a time: the next submit waits.

A failed write alone does not stop training: a run should not lose its work because a disk is full. `poll` or `wait`
returns the error once; if neither is called, the next `submit` raises it. To warn and continue:

    if (error := writer.wait()) is not None:
        warn(error)                          # the checkpoints before it are untouched
    writer.submit(step, groups, document)    # tries again with the newer state

Start reading at `BackgroundWriter`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from unisono.errors import CheckpointError
from unisono.state.checkpoint_store import CheckpointInfo, CheckpointStore
from unisono.state.codec import Json, to_json
from unisono.state.digest import copy_each

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time, and keeps the newest few. Used from one thread, on one rank.

    A thread runs for one write. It is not a daemon: an interpreter that ends first finishes the write, and never waits
    longer than that.

    Args:
        store: The folder of the checkpoints.
        keep: The number of checkpoints to keep after each write; see `CheckpointStore.prune`.
        on_written: Called in the writing thread after each checkpoint is safe on disk, with the seconds the write took.
    """

    def __init__(
        self, store: CheckpointStore, keep: int, on_written: Callable[[CheckpointInfo, float], None] | None = None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep} must be at least 1: a run without any checkpoint cannot be resumed")
        self._store = store
        self._keep = keep
        self._on_written = on_written
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None  # of the last write
        self._told = True  # the caller has that error

    def submit(self, step: int, groups: Mapping[str, Mapping[str, Tensor]], document: Json) -> None:
        """Copy the state and write it in the background. Training may change the tensors once this returns.

        Waits for a write that is in progress. Not a collective. Cost: a copy of all tensors to CPU memory; tensors that
        view the same memory are copied once.

        Raises:
            CheckpointError: An earlier write failed, and neither `poll` nor `wait` has returned its error; this state
                is then not submitted, and the same call again submits it. Or a tensor cannot be stored.
            TypeError: The document is not JSON.
        """
        error = self.wait()
        if error is not None:
            raise error
        made: dict[tuple[object, ...], Tensor] = {}
        copies = {group: copy_each(tensors, made, f"{group}.") for group, tensors in groups.items()}
        document = json.loads(to_json(document))  # the caller's lists may change while the thread works
        self.start(step, partial(self._store.write, step, copies, document))

    def start(self, step: int, write: Callable[[], CheckpointInfo]) -> None:
        """Write a checkpoint in the background by a function, which is then the only user of what it writes.

        Waits for a write that is in progress; see `submit` for errors.

        Args:
            step: The number of steps done.
            write: Writes it, and returns when it is safe on the disk. Called in a thread.
        """
        error = self.wait()
        if error is not None:
            raise error
        self._error, self._told = None, True
        # One thread for each write, not one that waits for work: that would prevent the process from ending.
        thread = threading.Thread(target=self._run, args=(step, write), name=f"checkpoint of step {step}")
        thread.start()
        self._thread = thread

    def poll(self) -> CheckpointError | None:
        """Return the error of a finished write, once; None otherwise, also during a write. Never waits."""
        if self.is_writing or self._told:
            return None
        self._told = True
        return self._error

    def join(self) -> None:
        """Wait until no write is in progress."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> CheckpointError | None:
        """Wait until no write is in progress, then return the result of `poll`."""
        self.join()
        return self.poll()

    @property
    def is_writing(self) -> bool:
        """True during a write: `submit` would wait."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, step: int, write: Callable[[], CheckpointInfo]) -> None:
        start = time.monotonic()
        try:
            info = write()
            if self._on_written is not None:
                self._on_written(info, time.monotonic() - start)
            self._store.prune(self._keep)
        except CheckpointError as error:
            self._error, self._told = error, False
        except Exception as error:  # a thread has no caller to which it would propagate: store any error
            failure = CheckpointError(
                f"the write of the checkpoint of step {step} ended by {type(error).__name__}: {error}. See the cause "
                f"above; if it is not in on_written, it is an error of unisono."
            )
            failure.__cause__ = error
            self._error, self._told = failure, False
