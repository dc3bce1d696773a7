"""Unmodified models of transformers that a Trainer trains over stages or in parts: the bits of one rank."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
PROGRAM = Path(__file__).parent / "programs" / "cut_transformers.py"


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("t5", 2),
        *(
            pytest.param(name, stages, marks=pytest.mark.soak)  # for Llama see test_pipeline_transformers.py, too
            for name, stages in [("llama", 2), ("llama", 3), ("t5", 3), ("bert", 3)]
        ),
    ],
)
def test_cut_over_ranks_they_have_the_bits_of_one_rank(fork_ranks, fork_python, name, stages):
    whole = fork_python(PROGRAM, 1, name)
    assert len(whole) == 1
    job = fork_ranks(stages, PROGRAM, stages, name)
    assert [job.lines(rank) for rank in range(stages)] == [whole] * stages


@pytest.mark.parametrize("names", [("bert",), pytest.param(("llama", "t5"), marks=pytest.mark.soak)], ids="-".join)
def test_divided_over_ranks_they_have_the_bits_of_one_rank(fork_ranks, fork_python, names):
    whole = fork_python(PROGRAM, "whole", *names)
    job = fork_ranks(3, PROGRAM, "shard", *names)
    assert len(whole) == len(names)
    assert [job.lines(rank) for rank in range(3)] == [whole] * 3
