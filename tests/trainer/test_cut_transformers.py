"""Unmodified models of transformers that a Trainer trains over stages or in parts: the bits of one rank."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
PROGRAM = Path(__file__).parent / "programs" / "cut_transformers.py"


def test_llama_bert_and_t5_have_the_bits_of_one_rank(fork_ranks, fork_python):
    whole = fork_python(PROGRAM, 1)
    assert len(whole) == 3
    job = fork_ranks(3, PROGRAM, 3)
    assert [job.lines(rank) for rank in range(3)] == [whole] * 3


def test_divided_over_ranks_they_have_the_bits_of_one_rank(fork_ranks, fork_python):
    whole = fork_python(PROGRAM, "whole")
    job = fork_ranks(3, PROGRAM, "shard")
    assert len(whole) == 3
    assert [job.lines(rank) for rank in range(3)] == [whole] * 3
