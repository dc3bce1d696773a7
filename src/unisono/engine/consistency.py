"""Checks that all ranks do the same, once in every step and before every other collective of a Trainer.

Everything that must be equal is condensed into one number, a fingerprint, which travels before anything whose size
depends on it: ranks that train different parameters send different lengths, which backends do not survive. Only if
fingerprints differ do ranks send each other the descriptions behind them, and then all raise the same error. No rank
has written anything by then, and all ranks have left the call, so they may go on. Within one host
`engine.shared.shared_consistency` publishes the numbers in shared memory; across hosts, and where memory cannot be
shared, `GroupConsistencyCheck` sends them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.activity import Wait
from unisono.collectives.world import World
from unisono.engine.step_transaction import STEP_UNDONE, Passed
from unisono.errors import RankMismatchError, UnisonoError
from unisono.mismatch import CALL, CallDescription, Document, describe_mismatch, tell_differences

__all__ = [
    "BROKEN",
    "BUFFERS",
    "WEIGHTS",
    "ConsistencyCheck",
    "GroupConsistencyCheck",
    "NoConsistencyCheck",
    "StepDescription",
    "settle_differences",
]

WEIGHTS, BUFFERS = "weights", "buffers"
"""The entries of a document with the checksums of all weights, and of all buffers of a stage, by name. Fingerprints may
differ because one rank alone has written some, or those of another stage, and be all the same otherwise; then these
decide."""

_TAG = 1
"""The tag of messages with fingerprints; gradients have 0."""
_REMEDY = (
    "Nothing was changed. Every rank must make the same calls in the same order, such as batches, step and evaluate: "
    "move them out of branches that only some ranks take."
)
BROKEN = (
    "an earlier step failed while its gradients were on their way to other ranks, so ranks no longer agree on what "
    "comes next. End the job and start it again; it resumes from the last checkpoint."
)
_FEW_RANKS = 4
"""Up to this many ranks send their numbers to each other; more use the backend's all-gather, for fewer messages."""


class StepDescription(NamedTuple):
    """The operation that a rank is about to perform."""

    fingerprint: int
    """62 bits followed by a zero bit; equal on ranks that do the same."""
    describe: Callable[[], Document]
    """Returns the document that the fingerprint stands for."""


class ConsistencyCheck(Protocol):
    """Compares what ranks are about to do.

    The calls of a step are `intend`, then `begin` once this rank is sure to take part, and `check` before anything that
    depends on the other ranks. They are not notified of a step that fails on this rank before `begin`.
    """

    @property
    def is_open(self) -> bool:
        """True if this rank's number has been published and the others' numbers have not been checked yet."""

    def intend(self, intent: StepDescription) -> None:
        """Set what this rank does next. Local."""

    def begin(self) -> None:
        """Publish this rank's number."""

    def check(self) -> Passed | None:
        """Compare the numbers of all ranks.

        Returns:
            The barrier that the check has passed, or None if it passes none.

        Raises:
            RankMismatchError: On all ranks, if the numbers differ.
        """

    def compare(self, intent: StepDescription) -> None:
        """Compare what ranks do outside a step. Every rank must call it, or take a step.

        Raises:
            RankMismatchError: On all ranks, if they do not do the same.
            UnisonoError: On this rank, after `break_off`.
        """

    def break_off(self) -> None:
        """Refuse all later calls at once: a step failed here while other ranks may rely on it. Local."""


class NoConsistencyCheck:
    """The check of a run with one rank, which has nothing to compare."""

    is_open = False

    def intend(self, intent: StepDescription) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        """Do nothing."""

    def compare(self, intent: StepDescription) -> None:
        """Do nothing."""

    def break_off(self) -> None:
        """Do nothing."""


class GroupConsistencyCheck:
    """Compares by messages of 8 bytes, which travel while this rank computes; see `ConsistencyCheck`.

    Args:
        world: The ranks.
        tag: A tag that no other messages of the group have, equal on all ranks. Each number is then received early: a
            sender waits until it has heard that the other side receives, so it takes half of the time between hosts.
    """

    def __init__(self, world: World, tag: int | None = None) -> None:
        assert world.group is not None
        self._world, self._group = world, world.group
        self._own = torch.zeros(1, dtype=torch.int64, device=world.device)
        self._all: list[Tensor] = []
        self._peers = [r for r in range(world.size) if r != world.rank]
        self._seen = {peer: world.wait_for(peer) for peer in self._peers}
        self._works: list[tuple[Wait | None, dist.Work]] = []
        self._sends = world.device.type == "cpu" and world.size <= _FEW_RANKS
        self._expected: tuple[list[Tensor], list[tuple[Wait | None, dist.Work]]] | None = None
        """The next numbers of the others, which this rank has begun to receive."""
        self._tag, self._expects = (_TAG, False) if tag is None else (tag, True)
        self._intent: StepDescription | None = None
        self._is_broken = False
        self.is_open = False

    def intend(self, intent: StepDescription) -> None:
        """See `ConsistencyCheck`."""
        self._intent = intent

    def begin(self) -> None:
        """See `ConsistencyCheck`."""
        assert self._intent is not None
        if self._is_broken:
            raise UnisonoError(BROKEN)
        if self.is_open:
            self._wait()  # for the numbers of a step that all ranks discarded
        self._own.fill_(self._intent.fingerprint)
        self.is_open = True
        if self._sends:
            self._all, self._works = self._expected or self._expect()
            for peer in self._peers:
                self._works.append((self._seen[peer], self._group.send([self._own], peer, self._tag)))
            self._expected = self._expect() if self._expects else None
        else:
            self._all = [self._own.new_zeros(1) for _ in range(self._world.size)]
            work = dist.all_gather(self._all, self._own, group=self._group, async_op=True)
            assert work is not None
            self._works.append((None, work))

    def check(self) -> None:
        """See `ConsistencyCheck`."""
        assert self._intent is not None
        self._wait()
        numbers: list[int] = torch.cat([self._all[peer] for peer in self._peers]).tolist()
        if any(number != self._intent.fingerprint for number in numbers):
            settle_differences(self._world, self._intent)

    def compare(self, intent: StepDescription) -> None:
        """See `ConsistencyCheck`."""
        self.intend(intent)
        self.begin()
        self.check()

    def break_off(self) -> None:
        """See `ConsistencyCheck`."""
        self._is_broken = True

    def _expect(self) -> tuple[list[Tensor], list[tuple[Wait | None, dist.Work]]]:
        """Begin to receive numbers of the others."""
        numbers = [self._own.new_zeros(1) for _ in range(self._world.size)]
        works: list[tuple[Wait | None, dist.Work]] = []
        for peer in self._peers:
            works.append((self._seen[peer], self._group.recv([numbers[peer]], peer, self._tag)))
        return numbers, works

    def _wait(self) -> None:
        for seen, work in self._works:
            self._world.waiter.wait(work, seen)
        self._works, self.is_open = [], False


def settle_differences(world: World, intent: StepDescription, engine: Document = MappingProxyType({})) -> None:
    """Exchange descriptions of the ranks' operations, and raise an error that names the differences.

    Every rank must call it. It returns if nothing differs but that some ranks have written weights, to the values that
    they have on all ranks.

    Args:
        world: The ranks.
        intent: The operation of this rank.
        engine: A description by the engine, compared only if nothing else differs.

    Raises:
        RankMismatchError: On all ranks, if something differs.
    """
    documents = world.gather((dict(intent.describe()), dict(engine)))
    everyone = [of_rank for of_rank, _ in documents]
    calls = {rank: CallDescription(document[CALL]) for rank, document in enumerate(everyone)}
    if different := describe_mismatch(calls, remedy=_REMEDY):
        raise RankMismatchError(different)
    weights, buffers = (
        {rank: document.pop(entry) for rank, document in enumerate(everyone) if entry in document}
        for entry in (WEIGHTS, BUFFERS)
    )
    differences = (
        tell_differences(everyone)
        or tell_differences([of_engine for _, of_engine in documents])
        or _differences_of_values(WEIGHTS, weights)
        or _differences_of_values(BUFFERS, buffers)
    )
    if differences is None and (weights or buffers):
        return
    differences = differences or "their fingerprints differ, though the descriptions behind them look the same"
    raise RankMismatchError(
        f"ranks differ: {differences}. {STEP_UNDONE} Do the same on every rank between steps, and from numbers that "
        "are equal on all ranks, such as the mean loss of a step or an evaluation."
    )


def _differences_of_values(entry: str, everyone: Mapping[int, Mapping[str, str]]) -> str | None:
    """Return the differences between checksums of ranks that have those of the same tensors; None if there are none.

    >>> _differences_of_values("weights", {0: {"a": "01"}, 1: {"b": "02"}, 2: {"a": "01"}, 3: {"b": "03"}})
    "weights differ at number 0: 'b = 02' on rank 1 and 'b = 03' on rank 3"
    """
    groups: dict[tuple[str, ...], dict[int, list[str]]] = defaultdict(dict)
    for rank, checksums in everyone.items():
        groups[tuple(checksums)][rank] = [f"{name} = {checksum}" for name, checksum in checksums.items()]
    told = (tell_differences([{entry: each} for each in group.values()], [*group]) for group in groups.values())
    return next((each for each in told if each is not None), None)
