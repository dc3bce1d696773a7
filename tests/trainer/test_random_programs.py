"""Random training programs come to one result, or to one refusal, on any number of ranks, stopped and resumed or not.

A difference is told with the program's seed. To look at it alone: `unisono run -n 3
tests/trainer/programs/random_training.py SEED --engine shared --verbose`; `--help` says more.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "random_training.py"
FIXED = [range(first, first + 8) for first in range(0, 40, 8)]
MANY = [range(first, first + 25) for first in range(1000, 1500, 25)]
ENGINES = ("auto", "collective")
"""Shared memory, wherever that can serve, and messages."""
TOLD = re.compile(r"program (\d+) = (.+)")


PEER_FAILED = re.compile(r"refused: (PeerError: \[rank #, group of the Trainer\]|RuntimeError: \[\S+gloo/transport)")
"""What a rank says whose peer has ended."""


@pytest.fixture
def outcomes(fork_ranks, tmp_path) -> Callable[..., dict[int, str]]:
    """Run programs, many in one job, and give what each comes to; not those that have too few virtual ranks."""

    def run(ranks: int, seeds: Iterable[int], *, engine: str, phase: str = "whole") -> dict[int, str]:
        left, found = list(seeds), {}
        options = ("--folder", tmp_path, "--engine", engine, "--phase", phase)
        while left:
            job = fork_ranks(ranks, PROGRAM, *left, *options, code=None, watched=False)
            told = defaultdict(list)
            for rank in range(ranks):
                for match in filter(None, map(TOLD.fullmatch, job.lines(rank))):
                    told[int(match[1])].append(match[2])
            if not told:  # it ended in its first program, and the others have not been tried
                told[left[0]] = [f"no word; exit code {job.code}; {job.err[-500:]}"]
            found |= {seed: in_one(said, ranks) for seed, said in told.items()}
            left = [seed for seed in left if seed not in found]
        return {seed: outcome for seed, outcome in found.items() if not outcome.startswith("needs no more than")}

    return run


def in_one(said: list[str], ranks: int) -> str:
    """What all ranks said alike; where one has failed, its error, of which the others know only that it failed."""
    causes = {each for each in said if not PEER_FAILED.match(each)} or set(said)
    return causes.pop() if len(said) == ranks and len(causes) == 1 else f"ranks said {said}"


def differences(outcomes, seeds: Iterable[int], plan: list[tuple[int, str, str]], show=str) -> list[str]:
    """Say which programs come to something else than on one rank, in the runs (ranks, engine, phase) of a plan."""
    expected = outcomes(1, seeds, engine="auto")
    show("".join(f"\nprogram {seed} = {outcome}" for seed, outcome in expected.items()))
    trained = {outcome for outcome in expected.values() if re.fullmatch("[0-9a-f]{64}", outcome)}
    assert len(trained) > 0.6 * len(expected), f"most programs are refused: {expected}"
    found = []
    for ranks, engine, phase in plan:
        for seed, outcome in outcomes(ranks, seeds, engine=engine, phase=phase).items():
            if outcome not in (expected[seed], "stopped"):
                found.append(f"program {seed}, {phase}, {engine}, {ranks} ranks: {outcome}, not {expected[seed]}")
    return found


def switched(turn: int) -> list[tuple[int, str, str]]:
    """A stop, and going on with other ranks and the other engine: each pair has its turn."""
    engines = ENGINES[turn % 2], ENGINES[1 - turn % 2]
    return [(1 + turn % 4, engines[0], "stopped"), (4 - turn // 4 % 4, engines[1], "resumed")]


DRAWN = [
    [(2, "auto", "stopped"), (3, "collective", "resumed")],
    [(3, "collective", "stopped"), (2, "auto", "resumed")],
    [(3, "auto", "whole")],
    [(2, "collective", "whole")],
    [(4, "auto", "whole")],
]
"""The runs of each fixed group beside that on one rank, with all engines, phases and numbers of ranks among them.

Others, such as to go on with one rank, are met by the many."""


@pytest.mark.parametrize("seeds", FIXED, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_random_programs_come_to_one_result(outcomes, seeds):
    found = differences(outcomes, seeds, DRAWN[FIXED.index(seeds)])
    assert not found, "\n".join(found)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", MANY, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_many_random_programs_come_to_one_result(outcomes, capsys, seeds):
    def show(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    whole = [(ranks, engine, "whole") for ranks in (2, 3, 4) for engine in ENGINES]
    found = differences(outcomes, seeds, [*whole, *switched(MANY.index(seeds))], show)
    assert not found, "\n".join(found)
