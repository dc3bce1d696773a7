"""Unmodified models of transformers that a Trainer trains over stages: the bits of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
PROGRAM = Path(__file__).parent / "programs" / "cut_transformers.py"


@pytest.fixture(scope="module")
def whole(fork_python):
    return fork_python(PROGRAM, 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_llama_bert_and_t5_have_the_bits_of_one_rank(fork_ranks, whole, ranks):
    job = fork_ranks(ranks, PROGRAM, ranks)
    assert len(whole) == 3
    assert [job.lines(rank) for rank in range(ranks)] == [whole] * ranks
