"""Commits of a cut model: which one counts after a death, for each moment at which a rank may die.

Two ranks are threads of one process. Runs with real ranks are in test_recovery.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.engine.staged import StageOwnership
from unisono.engine.staged.state_slots import StateContent
from unisono.engine.step_transaction import StepTransaction
from unisono.errors import PeerError, UnisonoError
from unisono.shm.segment import Segment
from unisono.trainer.stage_commits import StageCommits


class Runtime:
    """The shared memory of two ranks."""

    timeout_s, size, name = 60.0, 2, "test"

    def __init__(self, rank: int, segments: dict[str, Segment], meeting: threading.Barrier) -> None:
        self.rank, self._segments, self._meeting = rank, segments, meeting
        self.lost: set[int] = set()

    def segment(self, nbytes: int, what: str, *, prepare: Any = None, keeps_descriptor: bool = False) -> Segment:
        if not self.rank:
            self._segments[what] = Segment.create(nbytes, name=what)
            if prepare is not None:
                prepare(self._segments[what])
        self._meeting.wait(10)
        own = Segment(os.dup(self._segments[what].fd))
        if not keeps_descriptor:
            own.close_descriptor()
        return own

    def barrier(self, what: str, step: StepTransaction) -> None:
        if self.lost:
            raise PeerError(what)
        self._meeting.wait(10)

    def dead(self) -> list[int]:
        return sorted(self.lost)


class State:
    """The state of the stages of one rank."""

    capacity = 8192

    def __init__(self) -> None:
        self.weights = torch.zeros(4)

    def content(self) -> StateContent:
        return StateContent({"model": {"w": self.weights}, "ema": {}}, None)

    def put(self, content: StateContent) -> None:
        self.weights.copy_(content.groups["model"]["w"])

    def put_shared(self, content: StateContent) -> None:
        pass

    def forget(self) -> None:
        pass

    def version(self) -> int:
        return self.weights._version

    def equals(self, content: StateContent) -> bool:
        return torch.equal(self.weights, content.groups["model"]["w"])


class Rank:
    def __init__(self, runtime: Any) -> None:
        self.runtime, self.state, self.refusals = runtime, State(), list[str]()
        rank = runtime.rank
        cut: Any = SimpleNamespace(ranks=SimpleNamespace(size=2, place=rank), ownership=StageOwnership(whole="nowhere"))
        world: Any = SimpleNamespace(rank=rank, gather=lambda value, _: [value, value])
        state: Any = self.state
        self.commits = StageCommits(world, cut, state, is_on=lambda: True, refuse=self.refusals.append)
        self.commits.connect(runtime)

    def step(self, value: float) -> None:
        self.state.weights.fill_(value)
        self.commits.commit(StepTransaction())

    def dies_at_the_barrier(self) -> None:
        def barrier(what: str, step: StepTransaction) -> None:
            raise SystemExit

        self.runtime.barrier = barrier

    @property
    def weights(self) -> float:
        return self.state.weights[0].item()


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    segments, meeting = dict[str, Segment](), threading.Barrier(2)
    found = [Rank(Runtime(rank, segments, meeting)) for rank in range(2)]
    on_both(*(rank.commits.commit_base for rank in found))
    for value in (1.0, 2.0):
        for rank in found:
            rank.commits.begin()
        on_both(*(partial(rank.step, value) for rank in found))
    yield found
    for segment in segments.values():
        segment.close_descriptor()


def on_both(*calls: Callable[[], object]) -> list[BaseException | None]:
    """Call these at the same time, and return what they raise."""
    with ThreadPoolExecutor(2) as pool:
        return [future.exception() for future in [pool.submit(call) for call in calls]]


def test_a_rank_that_dies_before_its_commit_takes_the_others_back(ranks):
    survivor, _ = ranks
    survivor.commits.begin()
    survivor.runtime.lost = {1}
    with pytest.raises(PeerError):
        survivor.step(3.0)
    assert survivor.commits.settle() == 0
    survivor.commits.return_to_last()
    assert survivor.weights == 2.0
    assert survivor.commits.read(1).groups["model"]["w"][0].item() == 2.0, "the new rank goes on from the same step"


def test_a_rank_that_dies_after_its_commit_has_done_the_step(ranks):
    survivor, dead = ranks
    for rank in ranks:
        rank.commits.begin()
    dead.dies_at_the_barrier()
    with pytest.raises(SystemExit):
        dead.step(3.0)
    survivor.runtime.lost = {1}
    survivor.step(3.0)
    assert survivor.commits.settle() == 0
    assert survivor.commits.read(1).groups["model"]["w"][0].item() == 3.0
    assert survivor.commits.read(0).groups["model"]["w"][0].item() == 3.0


def test_a_rank_that_gives_up_takes_one_back_that_has_made_its_commit(ranks):
    """As where the death of a third one broke off the exchanges of the second."""
    first, second = ranks
    for rank in ranks:
        rank.commits.begin()
    second.commits.give_up()
    first.runtime.lost, first.runtime.dead = {2}, list
    with pytest.raises(PeerError):
        first.step(3.0)
    for rank in ranks:
        assert rank.commits.settle() == 0
        rank.commits.return_to_last()
        assert rank.weights == 2.0


def test_a_rank_whose_wait_was_broken_off_learns_that_the_commit_counts(ranks):
    first, second = ranks
    for rank in ranks:
        rank.commits.begin()
        rank.runtime.lost, rank.runtime.dead = {2}, list
    first.runtime.timeout_s = 0.0
    with pytest.raises(PeerError):
        first.step(3.0)
    second.step(3.0)
    assert (first.commits.settle(), second.commits.settle()) == (1, 0)
    assert first.commits.read(1).groups["model"]["w"][0].item() == 3.0


def test_a_rank_that_goes_on_after_a_step_has_failed_there_alone_is_found(ranks):
    first, second = ranks
    for rank in ranks:
        rank.commits.begin()
    second.commits.give_up()
    # The next call of the second rank counts as if it had come to the barrier.
    errors = on_both(partial(first.step, 3.0), partial(second.runtime.barrier, "a call", StepTransaction()))
    assert isinstance(errors[0], UnisonoError) and "has failed on another rank" in str(errors[0])


def test_weights_that_the_loop_changes_end_the_replacement_of_ranks(ranks):
    first, second = ranks
    first.state.weights.mul_(1.0)
    assert not first.commits.was_changed(), "they have the same values"
    first.state.weights.mul_(2.0)
    assert first.commits.was_changed() and not second.commits.was_changed()
    first.commits.begin()
    assert "were changed between two steps" in first.refusals[0]


def test_a_state_that_outgrows_its_memory_is_kept_no_longer_by_any_rank(ranks):
    for rank in ranks:
        rank.commits.begin()
    ranks[0].state.weights = torch.ones(10_000)
    assert on_both(*(partial(rank.step, 3.0) for rank in ranks)) == [None, None]
    assert "too large" in ranks[0].refusals[0]
    assert not ranks[1].commits.is_established
