"""The facts that the recovery of a run needs, and its actions on the run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

import torch

from unisono.collectives.world import World
from unisono.recovery_link import Membership
from unisono.trainer.call_log import CallLog
from unisono.trainer.rank_positions import Position
from unisono.trainer.snapshot import Cursor

__all__ = ["Recoverable"]

T = TypeVar("T")


class Recoverable(Protocol):
    """The run of a Trainer, as its recovery uses it; `RecoverableRun` is the one."""

    @property
    def cursor(self) -> Cursor:
        """The progress of the run."""

    @property
    def world(self) -> World:
        """The ranks."""

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""

    @property
    def virtual_ranks(self) -> int:
        """The largest number of ranks."""

    @property
    def gpus(self) -> int:
        """The number of GPUs if each rank needs one; 0: ranks need none, or can share one."""

    @property
    def fixed_size(self) -> str:
        """Why the number of ranks cannot change; "" if it can."""

    def position(self, log: CallLog, name: str, *, resizes: bool) -> Position:
        """Return the place of this rank, in the call of this name."""

    def undo(self) -> str | None:
        """Restore the state from before the call under way; return why that is not possible, if it is not."""

    def repair(self, dead: Collection[int]) -> str | None:
        """Put back what dead ranks were writing; return why that is not possible, if it is not.

        Every rank that is not new must call it, once all of them have left the call under way.
        """

    def disconnect(self) -> None:
        """Release the process group."""

    def alone(self, call: Callable[[], T]) -> T:
        """Return the result of a call that this rank makes for itself, between `disconnect` and `connect`."""

    def connect(self) -> None:
        """Make engines for the process group that there is now. Every rank must call it."""

    def note_call(self) -> None:
        """Note what a rank that misses the call that has ended needs, and the loop may change from now on."""

    def send_state(self, source: int, position: Position, *, wanted: bool, is_late: bool) -> None:
        """Send the state of one rank to those that want it. Every rank must call it.

        Args:
            source: The rank that sends.
            position: Its place.
            wanted: True if this rank takes the state.
            is_late: True if this rank has missed the latest call that the other one has made, and takes the state from
                the end of that call: it keeps its own place and `stateful` objects, which its loop goes on with.
        """

    def has_joined(
        self, membership: Membership, before: int, seconds: float, position: Position, *, took: bool
    ) -> None:
        """Go on after a recovery.

        Args:
            membership: The decision of the launcher.
            before: The number of ranks before.
            seconds: How long ranks have waited.
            position: The place of the rank with the most calls.
            took: True if this rank has got the state of that one.
        """

    def raise_pending(self) -> None:
        """Raise the exception of a signal that was put off."""
