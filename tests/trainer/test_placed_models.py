"""Placed models in a Trainer: the same bits on one device, on any number of ranks; several devices are refused."""

from __future__ import annotations

from pathlib import Path

PROGRAM = Path(__file__).parent / "programs" / "placed.py"


def test_placed_models_train_to_the_same_bits_on_any_number_of_ranks(fork_ranks):
    (whole,) = fork_ranks(1, PROGRAM, "whole").lines()
    for ranks in (1, 2):
        placed, several, pipeline, *replicate = fork_ranks(ranks, PROGRAM, "placed").lines()
        assert placed == whole
        assert (
            "'model' has been placed on cpu, meta, and a Trainer keeps each model on one device of each rank" in several
        )
        assert "parallel=Pipeline(...) runs a model with one stage on each rank, and place() has put" in pipeline
        assert replicate[-1] == "replicate True"
        # With one rank, replicate() does nothing.
        assert ["sums the gradient of '0.weight' over ranks where it is now" in line for line in replicate[:-1]] == [
            True
        ] * (ranks - 1)
    (alone,), (divided,) = (fork_ranks(ranks, PROGRAM, "split").lines() for ranks in (1, 2))
    assert alone == divided != whole  # dropout and batch norm are those of micro-batches
