"""One digest after 20 steps: models in parts, in replicas and in stages, against one rank with the whole model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "twenty_steps.py"
LAYOUTS = [
    (1, "block"), (2, "block"), (3, "block"), (4, "block"), (2, "size"), (4, "size"), (2, "zero1"), (3, "zero1"),
    (2, "replicas"), (4, "replicas"), (2, "stages2"), (3, "stages3"), (4, "stages2"), (1, "stages3"),
    (3, "joined"), (4, "default"),
    (2, "stages2_zero1"), (4, "stages2_zero1"), (4, "interleaved_zero1"), (4, "stages2_zero3"), (4, "stages4_zero3"),
]  # fmt: skip


@pytest.fixture(scope="module")
def on_one_rank(fork_python):
    """A function that trains cases once in one process, and returns what it prints."""
    found: dict[str, str] = {}

    def digests(*names):
        if missing := [name for name in names if name not in found]:
            found.update(zip(missing, fork_python(PROGRAM, "whole", *missing), strict=True))
        return [found[name] for name in names]

    return digests


@pytest.mark.parametrize(
    ("ranks", "layout", "names"),
    [
        (2, "block", ["fp16"]),
        pytest.param(2, "stages2", ["fp16"], marks=pytest.mark.soak),  # as test_cut_models.py has it, for fewer steps
        *(
            pytest.param(ranks, layout, ["float32", "bf16", "fp16", "llama"], marks=pytest.mark.soak)
            for ranks, layout in LAYOUTS
        ),
    ],
)
def test_twenty_steps_have_one_digest_in_each_layout(fork_ranks, on_one_rank, ranks, layout, names):
    names = [name for name in names if name != "llama" or find_spec("transformers")]
    job = fork_ranks(ranks, PROGRAM, layout, *names)
    assert [job.lines(rank) for rank in range(ranks)] == [on_one_rank(*names)] * ranks
