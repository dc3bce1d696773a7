"""What a process keeps of the memory that it has given back, by the C library's own heap."""

import json
import subprocess
import sys

import pytest

from unisono.estimate.heap_replay import HeapPeak, MemoryOperation

MB = 1 << 20
SERVER = """
import json, sys
from unisono.estimate.bare_rank import BareRank
from unisono.estimate.heap_replay import MemoryOperation
with BareRank(lambda: None) as rank:
    for line in sys.stdin:
        print(json.dumps(rank.replay([MemoryOperation(*each) for each in json.loads(line)])), flush=True)
"""


class Rank:
    """A bare rank that was forked from a new process: the heap of this one has holes of other tests."""

    def __init__(self, process):
        self._process = process

    def replay(self, operations):
        self._process.stdin.write(json.dumps(operations) + "\n")
        self._process.stdin.flush()
        return HeapPeak(*json.loads(self._process.stdout.readline()))


@pytest.fixture(scope="module")
def rank():
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Rank(process)
        process.stdin.close()
        assert process.wait(timeout=60) == 0


def take(block, nbytes, kind="activations"):
    return MemoryOperation("take", block, nbytes, kind)


def give(block):
    return MemoryOperation("give", block)


def test_a_hole_between_blocks_stays_with_the_process(rank):
    kept = [take(i, MB // 2, "gradients") if i % 2 else take(i, MB) for i in range(8)]
    freed = [give(i) for i in range(0, 8, 2)]
    peak = rank.replay([*kept, *freed, take(8, 4 * MB)])
    assert peak.used == {"gradients": 2 * MB, "activations": 4 * MB}
    assert peak.nbytes == pytest.approx(10 * MB, rel=0.02)  # 4 MB of it are holes


def test_a_hole_serves_a_smaller_block(rank):
    peak = rank.replay([take(0, 2 * MB), take(1, MB), give(0), take(2, MB)])
    assert peak.nbytes == pytest.approx(3 * MB, rel=0.02)


def test_free_memory_that_was_given_to_the_system_does_not_count(rank):
    before = [take(0, 8 * MB), take(1, MB), give(0)]
    after = [take(2, 12 * MB)]
    assert rank.replay([*before, *after]).nbytes == pytest.approx(21 * MB, rel=0.02)
    trimmed = rank.replay([*before, MemoryOperation("trim"), *after])
    assert trimmed.nbytes == pytest.approx(13 * MB, rel=0.02)
    assert trimmed.used == {"activations": 13 * MB}


def test_blocks_larger_than_this_machine_are_replayed(rank):
    peak = rank.replay([take(0, 1 << 42), give(0), take(1, 1 << 41)])
    assert peak.nbytes == 1 << 42 and peak.used["activations"] == 1 << 42


def test_replays_do_not_see_each_other(rank):
    operations = [take(0, MB), take(1, MB), give(0), take(2, 2 * MB)]
    assert len({rank.replay(operations).nbytes for _ in range(3)}) == 1
