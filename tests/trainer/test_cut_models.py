"""Models that are cut over ranks: the bits of one rank, on any number of stages and replicas, by every schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "cut.py"


@pytest.fixture(scope="module")
def whole(fork_python):
    return fork_python(PROGRAM, "1f1b", 1)


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages"),
    [
        (2, "gpipe", 2),
        (3, "1f1b", 3),
        (4, "1f1b", 4),
        (2, "interleaved", 4),
        (4, "1f1b", 2),
        (1, "1f1b", 3),
    ],
)
def test_stages_replicas_and_schedules_change_no_bit(fork_ranks, whole, ranks, schedule, stages):
    job = fork_ranks(ranks, PROGRAM, schedule, stages)
    assert len(whole) == 7
    assert [job.lines(rank) for rank in range(ranks)] == [whole] * ranks
