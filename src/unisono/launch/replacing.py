"""Replaces ranks that have died while the others wait: the part of the agent that acts on `launch.replacement_policy`.

A rank that a signal has ended is replaced at once. After an exception, it waits a moment for the same one in other
ranks, and for the end of the process. To replace means: a decision with a number is written into the pages of all
ranks, what the dead rank has started is killed, and a new process takes its place. The recovery is over when all ranks
have joined the latest decision. Start reading at `Replacing.take`.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from unisono.launch.failure.root_cause import RankFailure, RootCause
from unisono.launch.forkserver_handle import ForkServerHandle
from unisono.launch.generation import Generation
from unisono.launch.output.relay import Relay
from unisono.launch.replacement_policy import (
    Await,
    Death,
    DeathCounts,
    GiveUp,
    Member,
    decide_replacement,
    describe_death,
)
from unisono.launch.spares import Spares
from unisono.recovery_link import Membership
from unisono.text import name_ranks

__all__ = ["COMPANY_S", "Fork", "Replacing", "describe_deaths", "describe_spares"]

COMPANY_S = 0.1
"""How long to wait after an error for the same one in other ranks, which would make it an error of the program."""

_LINGER_S = 5.0
"""How long a rank may take to end after an uncaught exception before it is killed."""

_ARM_S = 5.0
"""How long a death waits for ranks that are still about to make their Trainer; then it ends the job."""

_POLL_S = 0.02
"""How often pages are read while ranks join, or are about to make their Trainer."""

_CALM_S = 30.0
"""How long ranks that wait for a new one are not called stuck."""

_OTHER_WAY = (
    "if the script went another way than in the other processes, what decides the way belongs into `stateful`; "
    "`unisono drill` tries the script"
)

Fork = Callable[[int, Mapping[str, int]], None]
"""Starts the process of a rank with its files."""


class Replacing:
    """The replacements in one generation of ranks.

    Args:
        enabled: False if no rank is ever replaced.
        number: The number of the last decision of earlier generations: ranks meet under that number in the job's store.
        completed: Called with an entry for each recovery that is over: number, ranks, what happened, seconds, and each
            death with times by the monotonic clock.
        fork: Starts the process of a rank with its files.
        spares: Processes that can take the place of a rank at once.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        enabled: bool,
        server: ForkServerHandle,
        relay: Relay,
        number: int,
        completed: Callable[[dict[str, Any]], None],
        fork: Fork,
        spares: Spares,
    ) -> None:
        self._generation, self._server, self._relay, self._fork = generation, server, relay, fork
        self._spares = spares
        self._enabled, self._completed = enabled, completed
        self.number = number
        """The number of the latest decision."""
        self._counts = DeathCounts()
        self._deaths: dict[int, Death] = {}  # of ranks that have not been replaced
        self._made: dict[int, int] = {}  # by rank, the number of the decision that made its present process
        self._rounds: dict[int, int] = {}  # by rank, the round of deaths in which that was
        self._replaced: list[Death] = []  # since all went on the last time
        self._decided_ns = 0  # when the first of these was to be replaced
        self._by_spare: list[bool] = []  # for each of these, whether a spare process took the place
        self._steps: dict[int, int] = {}  # by rank, the steps done when its last process ended
        self._due_s: dict[int, float] = {}  # by rank that has failed, when it has waited for company
        self._kill_s: dict[int, float] = {}  # by rank that has failed, when its process is killed
        self._poll_s: float | None = None
        self._arm_s: float | None = None  # until when ranks may make their Trainer, while a death waits for that
        self.reason = ""
        """Why no rank was replaced in the end, if the user should know; otherwise ""."""

    def take(self) -> bool:
        """Handle new failures. Return False if no rank is to be replaced: then the job ends as a whole."""
        generation, now_s = self._generation, time.monotonic()
        if self.reason:
            return False
        self.look()  # all may have joined since the last time, and one has died since
        for failure in generation.failures:
            known = self._deaths.get(failure.rank)
            if known is None:
                death = self._deaths[failure.rank] = self._examine(failure)
                self._count(death)
                self._due_s[failure.rank] = now_s + (0.0 if failure.code < 0 else COMPANY_S)
            else:
                self._deaths[failure.rank] = replace(known, failure=failure)
        return self._act(now_s)

    def tick(self) -> bool:
        """Do what is due. Return False if no rank is to be replaced: then the job ends as a whole."""
        now_s = time.monotonic()
        if self._poll_s is not None and now_s >= self._poll_s:
            self._poll_s = now_s + _POLL_S
            self.look()
        if now_s >= min((*self._due_s.values(), *self._kill_s.values()), default=math.inf):
            return self._act(now_s)
        return True

    def next_deadline_s(self) -> float | None:
        """Return when `tick` is due, by the monotonic clock; None if nothing is under way."""
        polls = [] if self._poll_s is None else [self._poll_s]
        return min((*self._due_s.values(), *self._kill_s.values(), *polls), default=None)

    def look(self) -> None:
        """Print that ranks have been replaced, once all have joined."""
        pages = [self._generation.pages[rank] for rank in self._generation.ranks]
        if not self._replaced or self._deaths or any(page.joined != self.number for page in pages):
            return
        begin_ns = min(death.failure.time_ns for death in self._replaced)
        seconds = (max(page.joined_ns for page in pages) - begin_ns) / 1e9
        told = describe_deaths(self._replaced)
        ranks = sorted({death.failure.rank for death in self._replaced})
        came_ns = max((pages[rank].came_ns for rank in ranks if rank < len(pages)), default=0)
        self._completed(
            {
                "number": self.number,
                "ranks": ranks,
                "what": told,
                "seconds": round(seconds, 3),
                "deaths": [death.facts() for death in self._replaced],
                "decided_ns": self._decided_ns,
                "script_s": round(max(0, came_ns - self._decided_ns) / 1e9, 3),
                "spares": sum(self._by_spare),
            }
        )
        how = describe_spares(self._by_spare)
        self._replaced.clear()
        self._by_spare.clear()
        self._poll_s = None
        self._counts.next_round()
        self._generation.forget_replaced()
        self._generation.observer.disregard_past(0.0, until_ns=min(page.joined_ns for page in pages))
        self._relay.say(f"{told}; replaced{how}, {seconds:.2f} s")

    def resize(self, size: int) -> None:
        """Tell all ranks, which wait between two steps, that there are `size` ranks now."""
        generation = self._generation
        self.number += 1
        for rank in range(generation.size, size):
            self._made[rank], self._rounds[rank] = self.number, self._counts.round
            self._steps[rank] = max(note.step for page in generation.pages.values() if (note := page.note) is not None)
        generation.resize(size)
        self._tell_ranks()

    @property
    def is_calm(self) -> bool:
        """True if no rank has failed or is about to join the others."""
        generation = self._generation
        return not self._deaths and not generation.failed and not any(map(self._lacks_state, generation.ranks))

    def is_new(self, rank: int) -> bool:
        """Return True if the latest process of a rank took the place of another."""
        return rank in self._made

    def left_without_joining(self, rank: int) -> bool:
        """Return True if a rank that has ended with code 0 took the place of another and never joined the others."""
        if rank not in self._generation.finished or not self._lacks_state(rank):
            return False
        self.reason = (
            f"rank {rank}, which took the place of one that died, ended before it met the others: {_OTHER_WAY}"
        )
        return True

    def explain(self, verdict: RootCause) -> str:
        """Return what new ranks may have to do with a failure in which calls of ranks differ; "" if nothing."""
        kind = (verdict.cause.account or {}).get("type", "")
        if not self._made or not (verdict.absent or kind.endswith("RankMismatchError")):
            return ""
        ranks = sorted(self._made)
        what = "new processes" if len(ranks) > 1 else "a new process"
        return f"{name_ranks(ranks)}, {what}, began the script anew in mid-run: {_OTHER_WAY}"

    def _count(self, death: Death) -> None:
        """Count a death that is new."""
        self._counts.add(death, again=self._rounds.get(death.failure.rank) == self._counts.round)

    def _act(self, now_s: float) -> bool:
        choice = decide_replacement(self._deaths.values(), self._members(), self._counts, enabled=self._enabled)
        if isinstance(choice, GiveUp):
            self._give_up(choice)
            return False
        if isinstance(choice, Await):
            return self._await(now_s)
        self._arm_s = None
        if ranks := self._ended(now_s):
            self._replace(ranks)
        self._kill_late(now_s)
        return True

    def _await(self, now_s: float) -> bool:
        """Decide again in a moment. Return False if ranks have been awaited for long enough."""
        if not self._may_await(now_s):
            self._give_up(GiveUp())
            return False
        for rank in self._deaths:
            self._due_s[rank] = max(self._due_s.get(rank, 0.0), now_s + _POLL_S)
        self._kill_late(now_s)
        return True

    def _may_await(self, now_s: float) -> bool:
        """Return True while a death may wait for ranks that are about to make their Trainer."""
        if self._arm_s is None:
            self._arm_s = now_s + _ARM_S
        return now_s < self._arm_s

    def _give_up(self, choice: GiveUp) -> None:
        self.reason = choice.reason
        if choice.exhausted is not None:
            self._generation.blame_again(choice.exhausted)
        self._due_s.clear()
        self._kill_s.clear()
        self._poll_s = None

    def _ended(self, now_s: float) -> list[int]:
        """Return the ranks to replace: all whose processes have ended, if one of these has waited for company."""
        generation = self._generation
        for rank in [rank for rank, due_s in self._due_s.items() if due_s <= now_s]:
            del self._due_s[rank]
            if rank in generation.running:  # it has said that it fails, and is about to end
                self._kill_s[rank] = now_s + _LINGER_S
        gone = self._deaths.keys() - generation.running
        return sorted(gone) if gone - self._due_s.keys() else []

    def _kill_late(self, now_s: float) -> None:
        """Kill processes that have said that they fail, and do not end."""
        for rank in [rank for rank, kill_s in self._kill_s.items() if kill_s <= now_s]:
            del self._kill_s[rank]
            self._generation.overdue.add(rank)
            self._server.signal(signal.SIGKILL, [rank], group=True)

    def _clear(self, rank: int) -> Death:
        """Clear away what is left of a process that has ended, for another one in its place."""
        death = self._deaths.pop(rank)
        self._due_s.pop(rank, None)
        self._kill_s.pop(rank, None)
        if death.failure.account is not None and death.failure.code > 0 and not death.was_asked:
            self.show_traceback(rank, death.failure.account)
        self._server.clear(self._generation.replaced(rank))
        return death

    def _replace(self, ranks: list[int]) -> None:
        """Start new processes for ranks whose processes have ended, and tell all ranks."""
        self.number += 1
        if not self._replaced:
            self._decided_ns = time.monotonic_ns()
        for rank in ranks:
            death = self._clear(rank)
            self._replaced.append(death)
            self._steps[rank] = death.step
            self._made[rank], self._rounds[rank] = self.number, self._counts.round
        begins = [self._fill(rank) for rank in ranks]
        self._tell_ranks()
        for begin in begins:
            begin()

    def _tell_ranks(self) -> None:
        """Write the latest decision into the pages of all ranks."""
        generation = self._generation
        new = [rank for rank in generation.ranks if self._lacks_state(rank)]
        for rank in generation.running:
            generation.pages[rank].decide(Membership(self.number, tuple(new), generation.size))
        for rank in generation.running:
            generation.pages[rank].settle(self.number)
        generation.observer.disregard_past(_CALM_S)
        self._poll_s = time.monotonic() + _POLL_S

    def _fill(self, rank: int) -> Callable[[], None]:
        """Open the files of the next process of a rank; return what begins it, once it can read who the ranks are."""
        spare = self._spares.take(rank)
        self._by_spare.append(spare is not None)
        if spare is not None:
            return partial(self._spares.grant, spare, rank)
        files = self._generation.open(rank)
        self._generation.pages[rank].mark_new()
        return partial(self._fork, rank, files)

    def _members(self) -> list[Member]:
        generation = self._generation
        return [
            Member(
                rank=rank,
                armed=(page := generation.pages[rank]).armed,
                has_state=not self._lacks_state(rank),
                refusal=page.refusal,
                finished=rank in generation.finished,
            )
            for rank in sorted((generation.running | generation.finished) - generation.failed)
            if rank in generation.ranks
        ]

    def _lacks_state(self, rank: int) -> bool:
        """Return True if the present process of a rank is a new one that has not joined the others."""
        return self._generation.pages[rank].joined < self._made.get(rank, 0)

    def _examine(self, failure: RankFailure) -> Death:
        rank, page = failure.rank, self._generation.pages[failure.rank]
        note = page.note
        step = note.step if note is not None else 0
        had_state = not self._lacks_state(rank)
        if not had_state:  # what it knows of steps may not be the run's yet
            step = max(step, self._steps[rank])
        return Death(
            failure=failure,
            step=step,
            note=note,
            samples=page.samples,
            armed=page.armed or rank in self._made,
            had_state=had_state,
            refusal=page.refusal,
        )

    def show_traceback(self, rank: int, account: Mapping[str, Any]) -> None:
        """Show the traceback of an uncaught exception, which the rank leaves to the agent."""
        if not account.get("printed"):
            self._relay.log(rank, account["traceback"])
            lines = account["traceback"].rstrip().splitlines()
            self._relay.show("\n".join(f"[{rank}] {line}".rstrip() for line in lines))


def describe_spares(by_spare: Sequence[bool]) -> str:
    """Return how many of the new processes were spare ones, in words.

    >>> describe_spares([True]), describe_spares([True, False]), describe_spares([False])
    (' by a spare', ', 1 of 2 by a spare', '')
    """
    if not any(by_spare):
        return ""
    spares = "a spare" if sum(by_spare) == 1 else "spares"
    return f" by {spares}" if all(by_spare) else f", {sum(by_spare)} of {len(by_spare)} by {spares}"


def describe_deaths(deaths: list[Death]) -> str:
    """Return how ranks ended, in the order of their ends: those that ended in the same way together."""
    parts = []
    for what, same in groupby(sorted(deaths, key=lambda death: death.failure.time_ns), key=describe_death):
        ranks = {death.failure.rank for death in same}
        parts.append(f"{name_ranks(ranks)} {f'were {what[4:]}' if len(ranks) > 1 and what[:4] == 'was ' else what}")
    return ", then ".join(parts)
