"""Random collectives on shared memory agree, to the bit, with what one process computes: `programs/random_calls.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "random_calls.py"
BURN = "while True: pass"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_random_collectives_agree_with_one_process(fork_ranks, ranks):
    job = fork_ranks(ranks, PROGRAM, 100 + ranks, 120)
    for rank in range(ranks):
        assert job.lines(rank)[-1] == "120 calls agree"


def test_sixteen_ranks_share_whatever_cores_there_are(fork_ranks):
    job = fork_ranks(16, PROGRAM, 5, 4)
    assert job.lines(15)[-1] == "4 calls agree"


def test_they_agree_when_ranks_sleep_at_random(fork_ranks):
    job = fork_ranks(3, PROGRAM, 7, 150, "sleeps")
    assert job.lines(2)[-1] == "150 calls agree"


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["", "sleeps", "load"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_ten_thousand_random_collectives_agree(ranks, kind):
    burners = (
        [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(2 * (os.cpu_count() or 1))]
        if kind == "load"
        else []
    )
    try:
        command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), str(PROGRAM), str(ranks), "10000", kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3000, check=False)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "10000 calls agree" in done.stdout
