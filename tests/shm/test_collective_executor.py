"""The executor: where operations run, in which order, and what becomes of errors."""

from __future__ import annotations

import threading

import pytest
from torch.distributed import DistBackendError
from two_ranks import two_ranks

from unisono.shm.collective_executor import CollectiveExecutor, Submission
from unisono.shm.work import Work


class _Group:
    """An executor of rank 0, and a peer that publishes when the test says so."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.rank, self.peer = two_ranks()
        self.timeout_s, self.ran = timeout_s, []
        self.executor = CollectiveExecutor(self.rank.slots, self.rank.waiting, name="test")

    def operation(self, name, rounds=1, error=None):
        for _ in range(rounds):
            round_ = self.rank.slots.publish()
            if late := self.rank.slots.missing(round_, [1]):
                yield round_, late
        if error is not None:
            raise error
        self.ran.append((name, threading.current_thread() is threading.main_thread()))

    def submit(self, name, *, stays=False, **options):
        work = Work(what=name, late=self.executor.late, drive=self.executor.run_until)
        self.executor.submit(Submission(self.operation(name, **options), work, timeout_s=self.timeout_s), stays=stays)
        return work


@pytest.fixture
def group():
    found = _Group()
    yield found
    found.executor.close("the test ends", timeout_s=5.0)


def test_what_peers_are_ready_for_runs_in_the_callers_thread(group):
    for _ in range(3):
        group.peer.slots.publish()
    for name in "abc":
        assert group.submit(name).is_completed()
    assert group.ran == [("a", True), ("b", True), ("c", True)]
    assert group.executor.pending() == []


def test_what_a_peer_is_late_for_goes_on_in_a_thread_in_order(group):
    works = [group.submit(name) for name in "abc"]
    assert [each.work.what for each in group.executor.pending()] == ["a", "b", "c"]
    assert group.executor.late() in ("", "rank 1")
    for _ in range(3):
        group.peer.slots.publish()
    assert all(work.wait() for work in works)
    assert group.ran == [("a", False), ("b", False), ("c", False)]


def test_a_caller_that_stays_waits_itself(group):
    threading.Timer(0.05, group.peer.slots.publish).start()
    assert group.submit("a", stays=True).is_completed()
    assert group.ran == [("a", True)]


def test_an_error_is_that_of_its_work_and_breaks_the_group(group):
    group.peer.slots.publish()
    failed = group.submit("a", error=ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        failed.wait()
    with pytest.raises(DistBackendError, match=r"a: rank 0: ValueError: no.*cannot be used any more"):
        group.submit("b").wait()
    with pytest.raises(DistBackendError, match="ValueError: no"):
        group.peer.waiting.poll_abort()


def test_a_wait_ends_after_its_timeout_and_names_the_rank():
    group = _Group(timeout_s=0.1)
    with pytest.raises(DistBackendError, match=r"a timed out: rank 1 did not take part within 0.1 s"):
        group.submit("a", stays=True).wait()
    assert group.rank.waiting.timed_out


def test_nothing_runs_after_the_end(group):
    assert group.executor.close("closed", timeout_s=1.0)
    with pytest.raises(RuntimeError, match="closed"):
        group.submit("a").wait()
    assert group.ran == []
