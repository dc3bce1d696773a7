"""Stands for the ranks of one host, within one process: their segments are the same memory."""

from __future__ import annotations

import threading

import pytest

from unisono.engine.step_transaction import Passed
from unisono.shm.segment import Segment


class Runtime:
    """What the parts of the shared engine ask of `SharedRuntime`, for one of several ranks in this process."""

    def __init__(self, rank, size, segments, lock, meeting):
        self.rank, self.size = rank, size
        self.barriers = Passed(0)
        self._segments, self._made, self._lock, self._meeting = segments, 0, lock, meeting

    def segment(self, nbytes, what, *, prepare=None):
        with self._lock:
            if self._made == len(self._segments):
                self._segments.append(Segment.create(max(nbytes, 1), name=what))
                if prepare is not None:
                    prepare(self._segments[-1])
        self._made += 1
        return self._segments[self._made - 1]

    def barrier(self, what, step, *, meanwhile=None, arrived=False):
        self._meeting.wait(10)
        self.barriers = Passed(self.barriers + 1)
        return self.barriers

    def wait_for_semaphore(self, semaphore, rank, what):
        assert semaphore.wait(10), what


@pytest.fixture
def make_runtimes():
    """Make the runtimes of so many ranks."""

    def make(size):
        segments, lock, meeting = [], threading.Lock(), threading.Barrier(size)
        return [Runtime(rank, size, segments, lock, meeting) for rank in range(size)]

    return make


@pytest.fixture
def run_threads():
    """Run a function of a number in so many threads, and return what it returned; raise what it raised."""

    def run(function, count):
        results, errors = [None] * count, []

        def call(k):
            try:
                results[k] = function(k)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(k,), daemon=True) for k in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a thread has not ended"
        if errors:
            raise errors[0]
        return results

    return run
