"""Random models that are cut at random places come to the bits of one rank, wherever they can be cut.

A difference is told with the program's seed. To look at it alone: `unisono run -n 3
tests/trainer/programs/random_cut.py SEED`.
"""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "random_cut.py"
TOLD = re.compile(r"program (\d+) = (.+)")
REFUSED = "cannot be cut"


def outcomes(fork_ranks, ranks, seeds):
    """What each program came to, the same on all ranks."""
    job = fork_ranks(ranks, PROGRAM, *seeds)
    found = [
        {int(match[1]): match[2] for match in map(TOLD.fullmatch, job.lines(rank)) if match} for rank in range(ranks)
    ]
    assert all(of_rank == found[0] for of_rank in found)
    assert found[0].keys() == set(seeds)
    return found[0]


def check(fork_ranks, seeds_by_ranks):
    expected = outcomes(fork_ranks, 1, sorted({*chain.from_iterable(seeds_by_ranks.values())}))
    assert REFUSED not in expected.values()
    refused = 0
    for ranks, seeds in seeds_by_ranks.items():
        found = outcomes(fork_ranks, ranks, seeds)
        refused += sum(each == REFUSED for each in found.values())
        different = {seed for seed, each in found.items() if each not in (expected[seed], REFUSED)}
        assert not different, f"on {ranks} ranks, programs {sorted(different)} come to other bits"
    assert refused <= sum(map(len, seeds_by_ranks.values())) / 4, f"{refused} programs cannot be cut"


def test_some(fork_ranks):
    check(fork_ranks, {2: [15], 3: [2]})


@pytest.mark.soak
def test_one_on_many_ranks(fork_ranks):
    check(fork_ranks, {5: [4]})


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_many(fork_ranks, first):
    check(fork_ranks, dict.fromkeys([2, 3, 4, 5, 6], range(first, first + 20)))
