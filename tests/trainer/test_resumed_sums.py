"""Gradients that autograd adds to those of earlier shares: the bits of sums that are made afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "resumed_sums.py"


@pytest.fixture(scope="module")
def afterwards(fork_python):
    expected, found = fork_python(PROGRAM, "afterwards")
    assert found == "0"
    return expected


def test_autograd_adds_every_second_share(fork_python, afterwards):
    digest, found = fork_python(PROGRAM, "plain")
    assert digest == afterwards
    assert int(found) >= 6 * 4 * 4  # steps, shares, and the parameters that all shares use


@pytest.mark.parametrize(
    ("ranks", "way"),
    [
        (2, "plain"),
        (3, "plain"),
        (2, "collective"),
        (2, "stages"),
        (4, "stages"),
        (2, "zero-bubble"),
        (2, "shards"),
        (3, "afterwards"),
    ],
)
def test_the_bits_are_those_of_any_number_of_ranks(fork_ranks, afterwards, ranks, way):
    job = fork_ranks(ranks, PROGRAM, way)
    assert [job.lines(rank)[0] for rank in range(ranks)] == [afterwards] * ranks
    found = [int(job.lines(rank)[1]) for rank in range(ranks)]
    if way == "afterwards":
        assert not any(found)
    elif ranks == 2 and way in ("plain", "collective"):
        assert all(found)
    elif way == "plain":  # of 2, 3 and 3 shares, hooks take the last one's gradients where it completes a sum
        assert [bool(each) for each in found] == [False, True, False]


def test_workers_add_alike_on_any_number_of_ranks(fork_ranks, fork_python):
    expected, found = fork_python(PROGRAM, "workers")
    job = fork_ranks(2, PROGRAM, "workers")
    assert [job.lines(rank)[0] for rank in range(2)] == [expected] * 2
    assert int(found) > 0


def test_a_gradient_that_comes_twice_is_refused_with_what_to_do(fork_ranks):
    job = fork_ranks(1, PROGRAM, "twice", code=1)
    assert "LossError: parameter 'side.weight' got its gradient twice in one backward" in job.err
    assert "call checkpoint with use_reentrant=False, or give the Trainer overlap=False" in job.err
