"""The promise: one digest on any number of ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
VARIANTS = Path(__file__).parent / "programs" / "variants.py"
OPTIMIZERS = VARIANTS.with_name("optimizers.py")


# What another variant or the test of optimizers has as well.
ALIKE = ["unshuffled", "scheduler", "sgd", "sgd fused", "checkpointed", "augmented", "augmented, 1 worker", "stream"]
# What is no business of messages.
ELSEWHERE = ["augmented, 3 workers", "stream, worker", "ema", "evaluated"]


def slow(*values: object) -> object:
    """Leave a case to the long suite."""
    return pytest.param(*values, marks=pytest.mark.soak)


@pytest.mark.parametrize("n", [1, slow(2), 3, slow(4), 8])
def test_digits_have_one_digest_on_any_number_of_ranks(fork_ranks, digits_on_one_rank, n):
    job = fork_ranks(n, EXAMPLES / "digits.py", "--steps", 4)
    assert job.lines()[-2:] == digits_on_one_rank[-2:]


@pytest.mark.parametrize("n", [slow(2), slow(4), slow(8)])
def test_language_model_has_one_digest_on_any_number_of_ranks(fork_ranks, language_model_on_one_rank, n):
    job = fork_ranks(n, EXAMPLES / "language_model.py", "--steps", 3)
    assert job.lines()[-2:] == language_model_on_one_rank[-2:]


@pytest.mark.parametrize(
    ("n", "engine", "without"),
    [
        (3, "shared", [*ALIKE, "compiled"]),  # which takes as long as all others together
        (2, "collective", [*ALIKE, *ELSEWHERE]),
        *(slow(n, "shared", []) for n in (2, 3, 5)),
        *(slow(n, "collective", []) for n in (2, 3)),
    ],
)
def test_every_way_to_train_has_one_digest(fork_ranks, variants_on_one_rank, n, engine, without):
    expected = {name: sha for name, sha in variants_on_one_rank.items() if name not in without}
    assert variants_of(fork_ranks(n, VARIANTS, "--engine", engine, *expected).lines()) == expected


@pytest.mark.parametrize(("n", "engine"), [slow(2, "shared"), (3, "shared"), slow(2, "collective")])
def test_every_optimizer_has_one_digest(fork_ranks, optimizers_on_one_rank, n, engine):
    """Also where ranks update pieces of parameters, or whole ones, in shared memory."""
    assert variants_of(fork_ranks(n, OPTIMIZERS, engine).lines()) == optimizers_on_one_rank


def test_what_must_not_matter_does_not_matter(variants_on_one_rank):
    """Overlap, worker processes, and the kind of activation checkpointing change no bit; a different order does."""
    sha = variants_on_one_rank
    assert sha["plain"] == sha["no overlap"]
    assert sha["augmented"] == sha["augmented, 1 worker"] == sha["augmented, 3 workers"]
    assert sha["stream"] == sha["stream, worker"]
    assert sha["checkpointed"] == sha["re-entrant"]
    different = [sha[name] for name in ("plain", "unshuffled", "clipped", "augmented", "bf16", "weighted")]
    assert len(set(different)) == len(different)


def variants_of(lines: list[str]) -> dict[str, str]:
    return dict(re.findall(r"^(.+) = ([0-9a-f]{64})$", "\n".join(lines), re.MULTILINE))
