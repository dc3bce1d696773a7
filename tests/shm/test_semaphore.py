"""Semaphores count, across processes, and a wait ends in time."""

from __future__ import annotations

import os
import time

import pytest

from unisono.shm.segment import Segment
from unisono.shm.semaphore import Semaphore


@pytest.fixture
def semaphore():
    segment = Segment.create(64, name="test")
    found = Semaphore(segment.address, segment)
    found.create()
    return found


def test_every_post_lets_one_wait_succeed(semaphore):
    assert not semaphore.try_wait()
    for _ in range(3):
        semaphore.post()
    assert semaphore.try_wait() and semaphore.wait(0.0) and semaphore.try_wait()
    assert not semaphore.try_wait()


def test_a_wait_ends_in_time(semaphore):
    begin_s = time.monotonic()
    assert not semaphore.wait(0.05)
    assert time.monotonic() - begin_s >= 0.05


def test_another_process_wakes_a_wait(semaphore):
    pid = os.fork()
    if not pid:
        time.sleep(0.02)
        semaphore.post()
        os._exit(0)
    assert semaphore.wait(30.0)
    os.waitpid(pid, 0)
