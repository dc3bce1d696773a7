"""The recovery of a run from the death of ranks, without a restart of the others.

The launcher makes a new process for a rank that has died, which runs the script from its top. It goes through calls
that the others have made without making them again (`call_log`), up to the call under way. The other ranks notice the
death there: the call fails, and leaves the state from before it. They wait for the new rank, all make a new process
group and engine (`rank_meeting`), the new rank takes the state of another one, and the call is repeated. Of ranks that
one call separates, since only some could finish it, the later ones take the state of the first, and the result of the
call. Start reading at `Recovery.call`.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

from unisono import recovery_link
from unisono.data.fetch import NoteSamples
from unisono.errors import PeerError, RankMismatchError
from unisono.job.current import active_job, guard_group, is_group_of_script, set_active_job
from unisono.job.group_watch import BETWEEN_CALLS, waits_for_the_dead
from unisono.job.rejoin import SupersededError, begin_alone, begin_as_new_rank, is_new_rank
from unisono.job.user_function import collectives_of_user, count_collectives
from unisono.recovery_link import Phase, RecoveryLink
from unisono.text import list_first
from unisono.trainer.call_log import CallLog, Dropped, LoggedCall
from unisono.trainer.call_replay import TURN, CallReplay
from unisono.trainer.launcher_decisions import DecisionError, LauncherDecisions
from unisono.trainer.rank_meeting import MetRanks, RankMeeting
from unisono.trainer.rank_positions import Position
from unisono.trainer.recoverable import Recoverable
from unisono.variables import HOST_VARIABLE

__all__ = ["Recovery"]

T = TypeVar("T")

_MOST_SAMPLES = 16
_RESIZE = "trainer.batches, where the number of ranks changes"


def _nothing(_result: object) -> None:
    """Account for a call that leaves no trace."""


class Recovery:
    """Makes the calls of a Trainer, and makes them again after ranks have been replaced.

    Args:
        obstacle: Why a single rank of this run cannot be replaced, as its settings say; None: it may be possible.
    """

    def __init__(self, obstacle: str | None = None) -> None:
        link = recovery_link.current
        self._link: RecoveryLink | None = link
        if link is not None:
            link.come()
        self._log = CallLog()
        self._replay = CallReplay(differ=self._differ)
        self._run: Recoverable | None = None
        self._resizes = False
        self._is_again = False
        """True in a call that is made again after a death."""
        self._within = self._is_calling = False
        self._counted = (0, 0)
        self.decisions = LauncherDecisions(link, self._check)
        self._meeting: RankMeeting | None = None
        if link is not None:
            self._meeting = RankMeeting(
                link, self.decisions, check=self._check, is_guarded=self._is_guarded, differ=self._differ
            )
        self.position: Position | None = None
        """Where the other ranks are, on a new rank."""
        self.is_joined = True
        """False on a new rank that has not joined the others yet."""
        if link is not None and link.is_armed:
            self.refuse("the script makes several Trainers, and a new rank would begin with the first one again")
        if obstacle is not None:
            self.refuse(obstacle)
        if is_new_rank():
            self._begin_as_new_rank()
        elif is_group_of_script():
            self.refuse("the script has made the process group itself, with torch.distributed")
        elif any(self._uses()):
            self.refuse("the script has called collectives of its own before it made the Trainer")

    def arm(self, run: Recoverable) -> None:
        """Recover this run from now on, if it can be recovered."""
        self._run, link = run, self._link
        if link is None:
            return
        active = active_job()
        if active is not None:
            set_active_job(replace(active, calls=weakref.ref(self)))
            if HOST_VARIABLE in os.environ and waits_for_the_dead(active.job.backend):
                self.refuse("ranks of several hosts cannot leave a group of NCCL in which one has died")
        if self.is_joined:
            self._counted = self._uses()
            guard_group(self._is_guarded)
        link.arm(run.virtual_ranks, gpus=run.gpus, fixed_size=run.fixed_size)

    def refuse(self, reason: str) -> None:
        """Tell the launcher why it must not replace single ranks of this job."""
        self.decisions.refuse(reason)

    @property
    def is_linked(self) -> bool:
        """True if there is a launcher that replaces ranks; otherwise nothing need be noted for it."""
        return self._link is not None

    @property
    def is_on(self) -> bool:
        """True if ranks of this run may be replaced."""
        return self.decisions.is_on

    def is_wanted(self) -> bool:
        """Return True if the launcher wants another number of ranks; see `run_context.Agreement`."""
        if self._link is None or self._run is None:
            return False
        return self._link.asked_size() not in (0, self._run.world.size) and self.is_on

    def agree(self, *, is_wanted: bool) -> None:
        """Note in a step what all ranks know of it together; see `run_context.Agreement`."""
        self._resizes = is_wanted

    @property
    def next_call(self) -> str | None:
        """On a new rank, the call of the others that comes next, or in which they are; None once it has joined them."""
        if self.is_joined:
            return None
        return self._replay.next_name if self._replay else self.position and self.position.name

    @property
    def resizes(self) -> bool:
        """True if all ranks are to call `resize` before the loop gets its next batch."""
        if self.is_joined:
            return self._resizes
        return not self._replay and self.position is not None and self.position.name == _RESIZE

    def resize(self) -> None:
        """Go on with another number of ranks, if that is still wanted. Every rank must call it between two steps.

        Raises:
            SystemExit: This rank leaves.
        """
        self.call(_RESIZE, self._change_size)
        self._resizes = False
        self.ask()

    def _change_size(self) -> None:
        """Wait until the number of ranks is the one that the launcher wants, or it wants no other one any more.

        Raises:
            DecisionError: The launcher has decided on who the ranks are.
        """
        assert self._run is not None
        if not self._resizes:  # the number has changed: a late rank must not wait for the next change here, alone
            return
        self.note("resize")
        self.decisions.wait_for_size(self._run.world.size)

    def note(self, phase: Phase, virtual_rank: int = -1, samples: Iterable[int] = ()) -> None:
        """Note what this rank does, for messages about its death; with samples only in a call that is made again."""
        if self._link is not None and self._run is not None:
            self._link.note(phase, self._run.cursor.total_steps, virtual_rank)
            if self._is_again and (known := list(samples)):
                self._note_samples(known)
            elif not self.is_joined:
                self._link.note_samples("")

    def noting(self) -> NoteSamples | None:
        """Return what notes samples before they are read: in a call that is made again, and before a new rank joins."""
        return self._note_samples if self._is_again or not self.is_joined else None

    def _note_samples(self, samples: Sequence[int]) -> None:
        assert self._link is not None
        names = list_first(samples, _MOST_SAMPLES)
        self._link.note_samples(f"sample{'s' * (len(samples) > 1)} {names}")

    def take_turn(self, body: Callable[[Callable[[], None]], T]) -> T | None:
        """Make a call in which ranks wait for one of them; see `job.current.RecoverableCalls`.

        A new rank may leave it out or make one more: whether there is something to prepare may depend on files.
        """
        if not self.is_joined and self.next_call != TURN:
            return None
        return self.call(TURN, lambda: body(self.decisions.look))

    def begin_epoch(self) -> None:
        """Note that the body of an epoch begins."""
        if self.is_joined:
            self._log.begin_epoch()

    def ask(self) -> None:
        """Note that the loop asks for a batch."""
        if self.is_joined:
            self._log.ask()

    def leave_epochs(self) -> None:
        """Note that the loop over epochs has ended."""
        if self.is_joined:
            self._log.leave_epochs()

    def call(
        self,
        name: str,
        body: Callable[[], T],
        *,
        again: bool = False,
        keeps: bool = True,
        account: Callable[[Any], None] = _nothing,
    ) -> T:
        """Make a call in which ranks need each other, and return its result; again after ranks have been replaced.

        Every rank must make it.

        Args:
            name: The call, equal on all ranks.
            body: Makes the call. If it fails because a rank has died, the state is the one from before.
            again: True if a new rank makes it as well when the others have made it before, alone.
            keeps: False if the result is too large to be kept for a new rank, which can then not go past the call.
            account: Called with the result, instead of body, if other ranks have made the call since the loop asked
                for a batch.
        """
        if self._link is None or self._within:
            return body()
        if self._replay:
            return self._replay.go_through(name, body, again=again, account=account)
        self._is_calling = True
        try:
            return self._make(name, body, again=again, keeps=keeps, account=account)
        finally:
            self._is_calling = False

    def _make(self, name: str, body: Callable[[], T], *, again: bool, keeps: bool, account: Callable[[Any], None]) -> T:
        """Make a call that other ranks have not made."""
        assert self._link is not None
        if not self.is_joined:
            self._meet(name)
            self._is_again = True
        elif self._uses() != self._counted:
            self.refuse(BETWEEN_CALLS)
        while True:
            try:
                self._within = True  # calls within this one are a part of it
                try:
                    result = body()
                finally:
                    self._within = False
                break
            except DecisionError:
                pass
            except Exception as error:  # of any class, from values that came over a group that was aborted
                assert self._meeting is not None
                assert self._run is not None
                if not self._meeting.is_due(error, self._run):
                    self._log.add_failed(name)
                    self._counted = self._uses()
                    raise
            if (missed := self._meet(name, partial(self._make_alone, body) if again else None)) is not None:
                if isinstance(missed.result, Dropped):
                    raise PeerError(f"only some ranks could finish {name} before a rank died")
                account(missed.result)
                self._counted = self._uses()
                return missed.result  # type: ignore[no-any-return]
            self._is_again = True
        self.note("loop")
        if self._is_again:
            self._is_again = False
            self._link.note_samples("")
        if self.is_on:
            assert self._run is not None
            self._log.add(name, None if again else result if keeps else Dropped())
            self._run.note_call()
        self._counted = self._uses()
        return result

    def _uses(self) -> tuple[int, int]:
        """Count the collectives of this process; `call` compares the number between two of its calls."""
        return (0, 0) if self._link is None else (count_collectives(), collectives_of_user())

    def _is_guarded(self) -> bool:
        """Return True if nothing has come over the group since the last call that nobody has confirmed.

        Called in the thread of a `GroupWatch`.
        """
        return self._is_calling or self._uses() == self._counted

    def _begin_as_new_rank(self) -> None:
        """Wait for the other ranks, and take over the calls that they have made."""
        assert self._meeting is not None
        begin_as_new_rank()
        self.is_joined = False
        self.position = self._meeting.first_position()
        self._log = self.position.log
        self._replay = CallReplay(self._log.calls(), differ=self._differ)

    def _differ(self, what: str) -> NoReturn:
        reason = f"a new rank that runs the script from its top comes to {what}"
        self.refuse(reason)
        raise RankMismatchError(f"no rank can be replaced alone: {reason}.")

    def _make_alone(self, body: Callable[[], T]) -> T:
        """Make a call for this rank alone. Calls within it are a part of it."""
        self._within = True
        try:
            return body()
        finally:
            self._within = False

    def _meet(self, name: str, alone: Callable[[], Any] | None = None) -> LoggedCall | None:
        """Go on together with all ranks, new ones and old ones.

        Args:
            name: The call under way.
            alone: Makes it, if it is one which a new rank makes alone.

        Returns:
            The call under way, if another rank has made it, and this one has its state now.
        """
        run, meeting = self._run, self._meeting
        assert run is not None
        assert meeting is not None
        self.note("recovery")
        started_s = time.monotonic()
        while True:
            run.disconnect()
            begin_alone(run.device)
            try:
                met = meeting.meet(run, self._log, name, is_joined=self.is_joined, resizes=self._resizes, alone=alone)
                return self._join(met, started_s)
            except SupersededError:
                continue
            except Exception as error:  # of any class, as in `call`
                if not meeting.is_due_again(error):
                    raise

    def _join(self, met: MetRanks | None, started_s: float) -> LoggedCall | None:
        """Go on with the ranks that have met; return the call under way if this one has missed it."""
        run, link = self._run, self._link
        assert run is not None
        assert link is not None
        if met is None:
            self._leave()
        waited_s = max(run.world.gather(time.monotonic() - started_s, "ranks that go on after a recovery"))
        if met.missed is not None:
            self._log = met.position.log
        if met.took:
            self._resizes = met.position.resizes
        elif met.membership.size != met.before:
            self._resizes = False
        self.is_joined = True
        self.decisions.follow(met.membership.number)
        link.joined(met.membership.number)
        run.has_joined(met.membership, met.before, waited_s, met.position, took=met.took)
        self._counted = self._uses()
        return met.missed

    def _leave(self) -> NoReturn:
        """End this rank, which the launcher has released: the others have its state."""
        self._link, self._within = None, False
        self.decisions.leave()
        raise SystemExit(0)

    def _check(self) -> None:
        """Look, while this rank waits, whether it was asked to end."""
        if self._run is not None:
            self._run.raise_pending()
