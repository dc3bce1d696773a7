"""The meeting of ranks after a decision of the launcher: new and old ones make a new process group and go on together.

Each rank leaves its process group, tells the others its place, and takes the state of the one that has made the most
calls if its own is missing or older. Start reading at `RankMeeting.meet`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from unisono.errors import PeerError, RankMismatchError, UnisonoError
from unisono.job.current import active_job, guard_group, is_cut_off
from unisono.job.rejoin import RecoveryStore, SupersededError, leave_group, rejoin, tell_job
from unisono.peer_loss import is_peer_lost
from unisono.recovery_link import Membership, RecoveryLink
from unisono.trainer.call_log import CallLog, LoggedCall
from unisono.trainer.launcher_decisions import LauncherDecisions
from unisono.trainer.rank_positions import Position, furthest, missed_call, read_positions, tell_position
from unisono.trainer.recoverable import Recoverable
from unisono.variables import HOST_VARIABLE

__all__ = ["MetRanks", "RankMeeting"]

_PATIENCE_S = 5.0
"""How long a rank that has lost a peer waits for the launcher to replace it."""
_HOSTS_PATIENCE_S = 60.0
"""The same where there may be several hosts."""
_DOUBT_S = 0.5
"""The same after an error that need not come from a lost peer."""


class MetRanks(NamedTuple):
    """The ranks that have met, as one of them sees it."""

    membership: Membership
    """The decision that they follow."""
    before: int
    """The number of ranks before."""
    position: Position
    """The place of the rank with the most calls."""
    missed: LoggedCall | None
    """The call under way, if another rank has made it, and this one has its state now."""
    took: bool
    """True if this rank has got the state of the one with the most calls."""


class RankMeeting:
    """Brings this rank together with the others.

    Args:
        link: This rank's end of the connection with the launcher.
        decisions: The launcher's decisions.
        check: Called while this rank waits; raises if it was asked to end.
        is_guarded: See `job.current.guard_group`.
        differ: Called with what this rank does otherwise than the others; raises.
    """

    def __init__(
        self,
        link: RecoveryLink,
        decisions: LauncherDecisions,
        *,
        check: Callable[[], None],
        is_guarded: Callable[[], bool],
        differ: Callable[[str], NoReturn],
    ) -> None:
        self._link, self._decisions = link, decisions
        self._check, self._is_guarded, self._differ = check, is_guarded, differ
        # What other hosts know has to come here first, and a host that is silent counts as lost after some seconds.
        self._patience_s = _PATIENCE_S if HOST_VARIABLE not in os.environ else _HOSTS_PATIENCE_S
        self._number = 0
        """The number of the decision after which ranks meet."""

    def first_position(self) -> Position:
        """Wait for the other ranks, on a new one, and return the place of the one with the most calls."""
        while True:
            try:
                return furthest(read_positions(self._store()))[1]
            except SupersededError:
                continue

    def is_due(self, error: Exception, run: Recoverable) -> bool:
        """Return True if ranks have died and will be replaced, and the state is that from before the call under way.

        Args:
            error: What the call has raised.
            run: The run, whose state is put back.
        """
        if not self._decisions.is_on or run.world.size == 1:
            return False
        is_lost = is_cut_off() or (isinstance(error, (UnisonoError, RuntimeError)) and is_peer_lost(error))
        if not is_lost and type(error) is not UnisonoError:  # a subclass says what else went wrong
            return False
        if not self._decisions.wait(self._patience_s if is_lost else _DOUBT_S):
            return False
        if (obstacle := run.undo()) is not None:
            self._decisions.refuse(obstacle)
            return False
        _release(error)
        return True

    def is_due_again(self, error: Exception) -> bool:
        """Return True if a meeting has failed since more ranks have died, which will be replaced.

        Args:
            error: What `meet` has raised, or the work of the ranks that have met.
        """
        is_own = not isinstance(error, (UnisonoError, RuntimeError)) or isinstance(error, RankMismatchError)
        self._decisions.follow(self._number)
        if (is_own and not is_cut_off()) or not self._decisions.wait(self._patience_s):
            return False
        _release(error)
        return True

    def meet(
        self,
        run: Recoverable,
        log: CallLog,
        name: str,
        *,
        is_joined: bool,
        resizes: bool,
        alone: Callable[[], Any] | None,
    ) -> MetRanks | None:
        """Make a new process group with all ranks, new ones and old ones, and a state that is equal on them.

        Args:
            run: The run, which uses no process group at present.
            log: The calls of this rank.
            name: The call under way.
            is_joined: False on a new rank that has not joined the others yet.
            resizes: True if the number of ranks is to change before the loop gets its next batch.
            alone: Makes the call under way, if that is one which a new rank makes alone.

        Returns:
            The ranks; None if the launcher has released this one.

        Raises:
            SupersededError: The launcher has made another decision: all meet again.
            PeerError: The ranks are too far apart, what a dead one has left cannot be undone, or some do not come.
            RankMismatchError: The others are in another call.
        """
        self._number = self._link.membership().number
        store = self._store()
        _, ranks, size = store.membership[:3]
        is_new, before = run.world.rank in ranks, run.world.size
        if run.world.rank < size and not is_new:  # first, since they need it, and to leave a group takes 10 ms
            tell_job(store)
            tell_position(store, run.world.rank, run.position(log, name, resizes=resizes and before == size))
        leave_group()  # before any wait: ranks that wait for this one there do not see that another has died
        if run.world.rank >= size:
            return None
        source, position = furthest(read_positions(store))
        missed = missed_call(log, source, position, is_joined=is_joined)
        expected = position.name if missed is None else missed.name
        if name != expected:
            self._differ(f"{name} where the others are in {expected}")
        dead = [rank for rank in ranks if rank < before]
        if not is_new and (obstacle := run.repair(dead)) is not None:
            self._decisions.refuse(obstacle)
            raise PeerError(f"no rank can be replaced alone: {obstacle}")
        if missed is not None and alone is not None:
            missed = missed._replace(result=run.alone(alone))
        rejoin(store)
        guard_group(self._is_guarded)
        run.connect()
        run.send_state(source, position, wanted=missed is not None or not is_joined, is_late=missed is not None)
        return MetRanks(store.membership, before, position, missed, took=missed is not None or is_new)

    def _store(self) -> RecoveryStore:
        active = active_job()
        assert active is not None
        timeout_s = active.job.timeout.total_seconds()
        return RecoveryStore(self._link, self._link.membership(), timeout_s=timeout_s, check=self._check)


def _release(error: BaseException | None) -> None:
    """Drop what the frames of an error hold, such as the process group: it is closed only when nothing holds it."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
