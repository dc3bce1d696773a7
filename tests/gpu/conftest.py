"""Programs on the simulated device; see tests/simulated_device.py."""

from pathlib import Path

import pytest

ON_DEVICE = Path(__file__).parents[1] / "simulated_device.py"


@pytest.fixture
def on_device(fork_ranks, simulated_device):
    """Run a program on ranks, and return the lines that all of them have printed."""

    def run(ranks, program, *args):
        job = fork_ranks(ranks, ON_DEVICE, simulated_device, program, *args, variables={"DEVICE": "sim:0"})
        lines = [job.lines(rank) for rank in range(ranks)]
        assert lines == [lines[0]] * ranks
        return lines[0]

    return run


@pytest.fixture(scope="module")
def of_one_rank():
    """What programs print with one rank, once a test has asked for it."""
    return {}


@pytest.fixture
def alone(on_device, of_one_rank):
    def run(*command):
        if command not in of_one_rank:
            of_one_rank[command] = on_device(1, *command)
        return of_one_rank[command]

    return run
