"""The directory of a run, locked by the rank that writes there: from its start, and then during each loop over epochs.

Between two loops it is free, so another job may go on with the run. Start reading at `RunDirectory.hold`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from unisono.errors import CheckpointError
from unisono.state.checkpoint_store import CheckpointStore
from unisono.state.lock import DirectoryLock

__all__ = ["RunDirectory"]


class RunDirectory:
    """The directory of a run, its checkpoints and the lock on it.

    Args:
        path: The directory.
        incremental: See `CheckpointStore`.
    """

    def __init__(self, path: Path, *, incremental: bool) -> None:
        self.path = path
        self.store = CheckpointStore(path / "checkpoints", incremental=incremental)
        """The checkpoints of the run."""
        self.lock = DirectoryLock(path)
        """Held while the run may write."""

    @property
    def is_lost(self) -> bool:
        """True if a later Trainer of this process has taken the directory."""
        return self.lock.lost

    def take_over(self) -> int:
        """Lock the directory in the place of a rank that has died; return the number of steps of its latest checkpoint.

        Raises:
            CheckpointError: Another job uses the directory.
        """
        self.lock.acquire()
        self.store.clean()
        return self._newest_step()

    def hold(self, last_step: int) -> None:
        """Lock the directory again, if it was released at the end of a loop over epochs.

        Args:
            last_step: The number of steps of this run's last checkpoint.

        Raises:
            CheckpointError: Another job uses the directory or has continued its run, or a later Trainer of this process
                has taken it, or it cannot be used any more.
        """
        if self.lock.is_held:
            return
        if self.lock.lost:
            raise CheckpointError(
                f"a later Trainer of this process keeps its run in {self.path}, so this one cannot go on there: "
                "use the later one, or give each its own directory."
            )
        try:
            self.lock.acquire()
        except OSError as error:
            raise CheckpointError(
                f"the directory {self.path} of this run cannot be used any more: {error.strerror} "
                f"({error.filename}). Put it back, or make a new Trainer with a directory that can be written to."
            ) from error
        try:
            newest = self._newest_step()
        except CheckpointError:
            self.lock.release()
            raise
        if newest > last_step:
            self.lock.release()
            raise CheckpointError(
                f"another job has gone on with the run in {self.path} up to step {newest}, after this one ended "
                f"its loop at step {last_step}: make a new Trainer, which goes on from there."
            )

    def release(self) -> None:
        """Let other jobs use the directory, until `hold`."""
        self.lock.release()

    def on_taken(self, rescue: Callable[[], object]) -> None:
        """Let a later Trainer of this process that takes the directory call a function before it reads there."""
        self.lock.settle = rescue

    def _newest_step(self) -> int:
        return next((info.step for info in self.store.list()), 0)
