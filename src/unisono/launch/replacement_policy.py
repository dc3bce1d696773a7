"""The decision whether ranks that have died are replaced while the others wait. Pure.

`launch.replacing` acts on it. What is not replaced ends the job, as every failure does without a Trainer. Start reading
at `decide_replacement`.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from unisono.launch.failure.root_cause import RankFailure
from unisono.launch.recovery_page import Note

__all__ = ["Await", "Death", "DeathCounts", "GiveUp", "Member", "Replace", "decide_replacement", "describe_death"]

_MOST_ROUNDS = 3
"""So many deaths at one step end the job."""
_MOST_WITH_SAME_ERROR = 2
"""So many deaths at one step end the job if they have the same exception."""

_OWN_ENDS = ("SystemExit", "KeyboardInterrupt")
"""Exceptions by which a program, or its user, ends a rank on purpose."""
_TERMINATED = 128 + signal.SIGTERM
"""The exit code of a rank whose Trainer has ended it because of SIGTERM, after its step."""


class Member(NamedTuple):  # it takes a third of a dataclass's time to make, and a leader makes a thousand
    """A rank of the job when others have died, by its present process."""

    rank: int
    armed: bool = True
    """True if it survives the death of others."""
    has_state: bool = True
    """False if it takes the place of another and has not joined the others yet."""
    refusal: str = ""
    """Its reason against replacing ranks; "" for none."""
    finished: bool = False
    """True if its program has ended without an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """The end of a rank's process."""

    failure: RankFailure
    step: int
    """The number of steps done since the start of the run."""
    note: Note | None = None
    """Its latest work; None if it has not noted anything."""
    samples: str = ""
    """The samples that it computed, as words; "" if they are not known."""
    armed: bool = True
    """True if it survived the death of others, or took the place of a rank that did."""
    had_state: bool = True
    """False if it took the place of another and had not joined the others yet."""
    refusal: str = ""

    @property
    def was_asked(self) -> bool:
        """True if its Trainer has ended it because of SIGTERM."""
        return self.failure.code == _TERMINATED and _kind(self.failure) == "SystemExit"

    def facts(self) -> dict[str, Any]:
        """Return what is known of it, for programs: rank, how it ended, phase ("" if not known), steps done, time."""
        return {
            "rank": self.failure.rank,
            "how": _how(self.failure),
            "phase": self.note.phase if self.note is not None and self.had_state else "",
            "step": self.step,
            "time_ns": self.failure.time_ns,
        }


@dataclass(frozen=True, slots=True)
class Replace:
    """The ranks are replaced."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """Others are about to survive the death of these ranks, which were quicker to make their Trainer: decide then."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job ends, or starts again as a whole."""

    reason: str = ""
    """Why no rank is replaced, if the user should know; otherwise ""."""
    exhausted: int | None = None
    """The rank whose death was one too many at its step; None if that is not the reason."""


def decide_replacement(
    deaths: Collection[Death], members: Collection[Member], counts: DeathCounts, *, enabled: bool = True
) -> Replace | Await | GiveUp:
    """Return the decision about ranks that have died and have not been replaced.

    Args:
        deaths: The deaths to decide about, at least one; `counts` knows them.
        members: The ranks that still run and have not failed, and those that have finished.
        counts: The deaths so far, by step.
        enabled: False if ranks must not be replaced.

    >>> killed = Death(failure=RankFailure(rank=2, code=-9, time_ns=0, reported=False), step=417)
    >>> counts = DeathCounts()
    >>> counts.add(killed, again=False)
    >>> decide_replacement([killed], [Member(rank=0), Member(rank=1)], counts)
    Replace(ranks=(2,))
    >>> decide_replacement([killed], [Member(rank=0, armed=False), Member(rank=1)], counts)
    Await()
    >>> decide_replacement([killed], [Member(rank=0), Member(rank=1, refusal="it calls all_reduce")], counts).reason
    'no rank can be replaced alone: it calls all_reduce'
    >>> decide_replacement([killed], [Member(rank=0, has_state=False), Member(rank=1, has_state=False)], counts).reason
    ''
    """
    if not enabled or not all(death.armed for death in deaths):
        return GiveUp()
    running = [member for member in members if not member.finished]
    survivors = [member for member in running if member.has_state]
    refusals = [member.refusal for member in members] + [death.refusal for death in deaths]
    refusal = next(filter(None, refusals), "")
    refused = GiveUp(f"no rank can be replaced alone: {refusal}") if refusal else None
    if not survivors or len(running) < len(members):
        # Ranks that wait in vain for the others may have been put in place before one of those refused.
        return refused if refused and len(running) > len(survivors) else GiveUp()
    if any(_kind(death.failure) in _OWN_ENDS and not death.was_asked for death in deaths):
        return GiveUp()
    if refused:
        return refused
    for death in deaths:
        if reason := counts.excess(death):
            return GiveUp(reason, exhausted=death.failure.rank)
    ranks = sorted(death.failure.rank for death in deaths)
    return Replace(tuple(ranks)) if all(member.armed for member in survivors) else Await()


@dataclass(slots=True)
class DeathCounts:
    """Counts the deaths of a generation of ranks by step.

    Deaths that come together are one: ranks that are killed at the same time say nothing about a step. So deaths are
    counted in rounds. A new round begins when all go on after a replacement (`next_round`), or when a rank dies that
    has itself been put in place in the present round.

    >>> counts = DeathCounts()
    >>> killed = Death(failure=RankFailure(rank=2, code=-9, time_ns=0, reported=False), step=417)
    >>> for _ in range(2):
    ...     counts.add(killed, again=False)
    >>> counts.excess(killed)
    ''
    >>> for _ in range(2):
    ...     counts.add(killed, again=True)
    >>> counts.excess(killed)
    'rank 2 is not replaced: this is the third death at step 418'
    """

    round: int = 0
    """The number of the present round."""
    _rounds: dict[int, set[int]] = field(default_factory=dict)
    _errors: dict[tuple[int, object], set[int]] = field(default_factory=dict)

    def next_round(self) -> None:
        """Count deaths apart from those before."""
        self.round += 1

    def add(self, death: Death, *, again: bool) -> None:
        """Count a death.

        Args:
            again: True if its process has been put in place in the present round.
        """
        if again:
            self.round += 1
        self._rounds.setdefault(death.step, set()).add(self.round)
        if (error := _identity(death.failure)) is not None:
            self._errors.setdefault((death.step, error), set()).add(self.round)

    def excess(self, death: Death) -> str:
        """Return why there have been too many deaths at the step of this one; "" if there have not."""
        error = _identity(death.failure)
        same = len(self._errors.get((death.step, error), ())) if error is not None else 0
        if len(self._rounds.get(death.step, ())) >= _MOST_ROUNDS:
            return f"rank {death.failure.rank} is not replaced: this is the third death at {_place(death)}"
        if same >= _MOST_WITH_SAME_ERROR:
            kind = _kind(death.failure)
            return f"rank {death.failure.rank} is not replaced: {kind} for the second time at {_place(death)}"
        return ""


def describe_death(death: Death) -> str:
    """Return how a rank ended and what it did, without its name.

    >>> killed = RankFailure(rank=2, code=-9, time_ns=0, reported=False)
    >>> describe_death(Death(failure=killed, step=417, note=Note("backward", 417, 3)))
    'was killed by SIGKILL in backward of step 418'
    """
    where = _doing(death)
    return f"{_how(death.failure)} {where}" if where else _how(death.failure)


def _how(failure: RankFailure) -> str:
    kind = _kind(failure)
    if failure.code == _TERMINATED and kind == "SystemExit":
        kind = "SystemExit for SIGTERM"
    return f"raised {kind}" if kind else failure.describe_end().removeprefix(f"rank {failure.rank} ")


def _doing(death: Death) -> str:
    if not death.had_state:
        return f"before it had joined the others, at step {death.step + 1}"
    if death.note is None:
        return ""
    phase, step = death.note.phase, death.note.step
    if phase in ("loop", "evaluation"):
        what = "the loop" if phase == "loop" else "an evaluation"
        return f"in {what}, {f'after step {step}' if step else 'before step 1'}"
    if phase == "recovery":
        return f"while it waited for a new rank, at step {step + 1}"
    return f"in {'the ' * (phase in ('sum', 'update'))}{phase} of step {step + 1}"


def _place(death: Death) -> str:
    """Return the step of a death, with virtual rank and samples as far as they are known."""
    words = [f"step {death.step + 1}"]
    if death.note is not None and death.note.virtual_rank >= 0:
        words.append(f"virtual rank {death.note.virtual_rank}")
    if death.samples:
        words.append(death.samples)
    return ", ".join(words)


def _kind(failure: RankFailure) -> str:
    """Return the type of the exception that ended a rank, without its module; "" if it recorded none."""
    account: Mapping[str, Any] = failure.account or {}
    kind: str = account.get("type", "") if failure.code > 0 else ""
    return kind.rpartition(".")[2]


def _identity(failure: RankFailure) -> tuple[object, ...] | None:
    """Return the exception that ended a rank and its place; None if it recorded none."""
    if not _kind(failure) or failure.account is None:
        return None
    frames = failure.account.get("frames") or [{}]
    return failure.account["type"], frames[-1].get("file"), frames[-1].get("line")
