"""Random loops come to the same bits on any number of ranks, in each engine, however the model is divided.

Random programs (test_random_programs.py) vary the model and the optimizer; these vary what a loop does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "random_loop.py"
DIVIDED = [(2, "auto"), (2, "block"), (3, "size"), (3, "zero1"), (3, "stages"), (2, "stages")]
WHOLE = [(2, "auto+"), (3, "auto+"), (3, "collective+")]


def check(fork_ranks, fork_python, seeds, ranks, how):
    alone = fork_python(PROGRAM, "auto+" if how.endswith("+") else "auto", seeds)
    job = fork_ranks(ranks, PROGRAM, how, seeds)
    assert [job.lines(rank) for rank in range(ranks)] == [alone] * ranks
    assert "warning" not in job.err.replace("warning: every micro-batch has one sample", "")


@pytest.mark.parametrize(
    ("seeds", "ranks", "how"),
    [
        ("0-11", 2, "auto+"),
        ("12-23", 3, "auto+"),
        ("24-29", 3, "collective+"),
        ("30-34", 2, "block"),
        ("35-39", 3, "stages"),
    ],
)
def test_some_loops_have_one_digest(fork_ranks, fork_python, seeds, ranks, how):
    check(fork_ranks, fork_python, seeds, ranks, how)


def check_stopped(fork_ranks, fork_python, folder, seeds, begun, gone_on):
    """Stop loops on some ranks, and let others go on with them."""
    alone = fork_python(PROGRAM, "auto", seeds)
    for (ranks, how), options in ((begun, ["--stop"]), (gone_on, [])):
        job = fork_ranks(ranks, PROGRAM, how, seeds, "--folder", folder, *options)
    assert [job.lines(rank) for rank in range(gone_on[0])] == [alone] * gone_on[0]


@pytest.mark.parametrize(
    ("seeds", "begun", "gone_on"), [("40-47", (2, "auto"), (3, "auto")), ("48-51", (3, "size"), (2, "stages"))]
)
def test_some_loops_that_are_stopped_have_one_digest(fork_ranks, fork_python, tmp_path, seeds, begun, gone_on):
    check_stopped(fork_ranks, fork_python, tmp_path, seeds, begun, gone_on)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", [f"{first}-{first + 24}" for first in range(400, 500, 25)])
@pytest.mark.parametrize(
    ("begun", "gone_on"),
    [
        ((1, "auto"), (2, "auto")),
        ((3, "auto"), (1, "auto")),
        ((2, "block"), (3, "stages")),
        ((3, "stages"), (2, "auto")),
    ],
)
def test_many_loops_that_are_stopped_have_one_digest(fork_ranks, fork_python, tmp_path, seeds, begun, gone_on):
    check_stopped(fork_ranks, fork_python, tmp_path, seeds, begun, gone_on)


@pytest.mark.soak
@pytest.mark.parametrize("seeds", [f"{first}-{first + 24}" for first in range(100, 400, 25)])
@pytest.mark.parametrize(("ranks", "how"), [*WHOLE, *DIVIDED])
def test_many_loops_have_one_digest(fork_ranks, fork_python, seeds, ranks, how):
    check(fork_ranks, fork_python, seeds, ranks, how)
