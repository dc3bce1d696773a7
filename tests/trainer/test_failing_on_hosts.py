"""Steps that fail on several hosts leave nothing behind that a later step would take for its own."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "failing_on_hosts.py"


@pytest.mark.parametrize("ranks", [2, 3])
def test_steps_that_fail_on_hosts_change_nothing(fork_ranks, fork_python, ranks):
    (expected,) = fork_python(PROGRAM, 0)
    job = fork_ranks(ranks, PROGRAM, 1)
    for rank in range(ranks):
        assert job.lines(rank)[-1] == expected
