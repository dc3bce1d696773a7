"""A schedule on several ranks computes losses, gradients and buffers of one process, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "pipelined.py"

STARTS = {
    "mlp": ["5", "9", "16", "20"],
    "residual": ["blocks.1", "blocks.3", "blocks.4", "head"],
    "u_net": ["down.1", "middle", "wider.1"],
    "language_model": ["layers.1", "layers.2", "norm"],
}


@pytest.fixture(scope="module")
def plain(fork_python):
    known = {}

    def run(model):
        if model not in known:
            known[model] = json.loads(fork_python(PROGRAM, model, "plain")[-1])
        return known[model]

    return run


def parts(fork_ranks, ranks, *arguments):
    job = fork_ranks(ranks, PROGRAM, *arguments)
    found = {}
    for rank in range(ranks):
        own = json.loads(job.lines(rank)[-1])
        assert not own.keys() & found.keys()
        found |= own
    return found


SCHEDULES = [("gpipe", 2, 2), ("zero-bubble", 3, 3), ("interleaved", 2, 4)]
OFTEN = {("residual", "gpipe"), ("u_net", "zero-bubble"), ("language_model", "interleaved")}
"""Each schedule, and with the tests below each model; the other pairs run among the long tests."""


@pytest.mark.parametrize(
    ("model", "schedule", "ranks", "stages"),
    [
        pytest.param(model, *way, marks=() if (model, way[0]) in OFTEN else pytest.mark.soak)
        for way in SCHEDULES
        for model in STARTS
    ],
)
def test_schedules_compute_what_one_process_does(fork_ranks, plain, model, schedule, ranks, stages):
    assert parts(fork_ranks, ranks, model, schedule, *STARTS[model][: stages - 1]) == plain(model)


def test_one_rank_may_have_all_stages(fork_ranks, plain):
    assert parts(fork_ranks, 1, "residual", "interleaved", "blocks.2", "blocks.4") == plain("residual")


def test_five_ranks(fork_ranks, plain):
    assert parts(fork_ranks, 5, "mlp", "1f1b", *STARTS["mlp"]) == plain("mlp")
