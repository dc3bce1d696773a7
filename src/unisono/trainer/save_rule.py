"""When a run is saved: by its policy, and by the place and the time of its latest checkpoint."""

from __future__ import annotations

import time

from unisono.state.policy import Checkpoints, is_due

__all__ = ["Place", "SaveRule"]

Place = tuple[int, int, int]
"""Epoch, its next step, and steps done in all: see `Cursor.place`."""


class SaveRule:
    """Says whether a checkpoint is due.

    Args:
        policy: When to save.
    """

    def __init__(self, policy: Checkpoints) -> None:
        self._policy = policy
        self.last: Place = (0, 0, 0)
        """The place of the latest checkpoint, or of the start."""
        self._last_s = time.monotonic()

    def begin(self, place: Place) -> None:
        """Count steps and time from here on: a checkpoint of this place is written, or the run starts there."""
        self.last, self._last_s = place, time.monotonic()

    def is_due_after_step(self, total_steps: int) -> bool:
        """Return True if a checkpoint will be due after a step, by steps or by time.

        Args:
            total_steps: Steps done in all after it.
        """
        since_s = time.monotonic() - self._last_s
        return is_due(self._policy, steps_since=total_steps - self.last[2], seconds_since=since_s, epoch_ended=False)

    def is_due_by_epoch(self, place: Place, *, epoch_ended: bool) -> bool:
        """Return True if the end of an epoch asks for a checkpoint. Equal on all ranks."""
        return epoch_ended and self._policy.every_epoch and place[2] > 0

    def is_due(self, place: Place, *, epoch_ended: bool, by_time: bool = True) -> bool:
        """Return True if a checkpoint is due now.

        Args:
            place: The place of the run.
            epoch_ended: True if the loop asks for its next epoch.
            by_time: False to leave the time out.
        """
        if place == self.last:
            return False
        since_steps, since_s = place[2] - self.last[2], time.monotonic() - self._last_s if by_time else 0.0
        # The loop may have changed the state after the last batch of an epoch, without a step.
        since_steps = max(since_steps, int(epoch_ended and place[2] > 0))
        return is_due(self._policy, steps_since=since_steps, seconds_since=since_s, epoch_ended=epoch_ended)
