"""The launcher's decisions on who the ranks are, as one rank of a Trainer waits for them and follows them.

Start reading at `LauncherDecisions.wait`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from unisono.recovery_link import RecoveryLink

__all__ = ["DecisionError", "LauncherDecisions"]

_PAUSE_S = 0.0005


class DecisionError(Exception):
    """The launcher has decided on who the ranks are, and all meet now."""


class LauncherDecisions:
    """The decisions of a launcher, if there is one that replaces ranks.

    Args:
        link: This rank's end of the connection with the launcher.
        check: Called while this rank waits; raises if it was asked to end.
    """

    def __init__(self, link: RecoveryLink | None, check: Callable[[], None]) -> None:
        self._link, self._check = link, check
        self._followed = 0 if link is None else link.membership().number
        self._refused = False

    @property
    def is_on(self) -> bool:
        """True if ranks of this run may be replaced."""
        return self._link is not None and not self._refused

    @property
    def is_asked_alone(self) -> bool:
        """True if SIGTERM is meant for this rank alone: the others go on."""
        return self._link is not None and not self._refused and not self._link.job_ends()

    @property
    def has_failed(self) -> bool:
        """True if the launcher ends the job because a rank has failed."""
        return self._link is not None and self._link.job_failed()

    def loses_ranks(self) -> bool:
        """Return True if ranks are replaced that this rank has not met yet, or the job ends because of a failure."""
        return self.has_failed or self._has_come()

    def refuse(self, reason: str) -> None:
        """Tell the launcher why it must not replace single ranks of this job."""
        if self._link is not None and not self._refused:
            self._refused = True
            self._link.refuse(reason)

    def follow(self, number: int) -> None:
        """Note that this rank follows the decision of this number."""
        self._followed = number

    def leave(self) -> None:
        """Follow no decision from now on: the launcher has released this rank."""
        self._link = None

    def wait(self, patience_s: float) -> bool:
        """Wait for a decision that this rank has not followed yet; return False if none comes in time."""
        end_s, pause_s = time.monotonic() + patience_s, _PAUSE_S
        while not self._has_come():
            if time.monotonic() >= end_s:
                return False
            self._check()
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, 0.01)
        return True

    def look(self) -> None:
        """Leave a call that waits for other ranks, once the launcher has replaced some.

        Raises:
            DecisionError: The launcher has decided on who the ranks are.
        """
        self._check()
        if self.is_on and self._has_come():
            raise DecisionError

    def wants_other_size(self, size: int) -> bool:
        """Return True if the launcher wants another number of ranks than this one."""
        return self._link is not None and self._link.wanted_size() not in (0, size)

    def wait_for_size(self, size: int) -> None:
        """Wait until the launcher does not want another number of ranks than this one any more.

        Raises:
            DecisionError: The launcher has decided on who the ranks are.
        """
        while self.wants_other_size(size):
            self._check()
            if self._has_come():
                raise DecisionError
            time.sleep(_PAUSE_S)

    def _has_come(self) -> bool:
        """Return True if there is a decision that this rank has not followed."""
        return self._link is not None and self._link.membership().number != self._followed
