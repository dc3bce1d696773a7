"""Tells of the checkpoints of a run, also from the thread that writes them. Start reading at `CheckpointEvents`."""

from __future__ import annotations

from unisono.state.checkpoint_store import CheckpointInfo
from unisono.watch import EventLog

__all__ = ["CheckpointEvents"]


class CheckpointEvents:
    """Emits the events of checkpoints, and keeps what a listener raises in the writer's thread for the loop."""

    def __init__(self) -> None:
        self._log = EventLog()
        self._raised: BaseException | None = None

    def begin(self, log: EventLog) -> None:
        """Emit events to a log from now on."""
        self._log = log

    def warn(self, sentence: str) -> None:
        """Emit a warning."""
        self._log.emit("warning", message=sentence)

    def tell(self, info: CheckpointInfo, seconds: float) -> None:
        """Emit the event of a complete checkpoint.

        Raises:
            BaseException: What a listener raises.
        """
        self._log.emit(
            "checkpoint", path=str(info.path), total_steps=info.step, nbytes=info.nbytes, seconds=round(seconds, 3)
        )

    def tell_in_background(self, info: CheckpointInfo, seconds: float) -> None:
        """Emit it as `tell` does, and keep what a listener raises: the checkpoint is written."""
        try:
            self.tell(info, seconds)
        except BaseException as error:  # of a listener: the loop's next call raises it
            self._raised = error

    def raise_for_listener(self) -> None:
        """Raise, once, what a listener raised when a checkpoint was written."""
        if self._raised is not None:
            error, self._raised = self._raised, None
            try:
                raise error
            finally:
                del error  # or it and this frame would keep each other, and the loop under way with them
