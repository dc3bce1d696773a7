"""The facts that the recovery of a run needs, and its actions on the run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

import torch

from unisono.collectives.world import World
from unisono.recovery_link import Membership
from unisono.trainer.call_log import CallLog
from unisono.trainer.rank_positions import Position
from unisono.trainer.snapshot import Cursor

__all__ = ["Account", "Recoverable"]


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

    def connect(self) -> None:
        """Make engines for the process group that there is now. Every rank must call it."""

    def send_state(self, source: int, *, wanted: bool, keeps_objects: bool) -> None:
        """Send the state of one rank to those that want it. Every rank must call it.

        Args:
            source: The rank that sends.
            wanted: True if this rank takes the state.
            keeps_objects: True if the loop of this rank has changed its `stateful` objects as far as it has come; that
                of the other one may have come further since the call.
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


class Account(Protocol):
    """Accounts for a call that other ranks have made."""

    def __call__(self, result: Any, /, *, counts: bool) -> None:
        """See `Recovery.call`."""
