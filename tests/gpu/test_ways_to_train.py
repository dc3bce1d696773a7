"""Every way to train comes to one digest on a GPU, whichever ranks share it, over gloo and over NCCL.

`make gpu` runs these where there is an NVIDIA GPU. One is enough: over NCCL ranks may share it if they say that they
are on separate hosts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(240)]
PROGRAM = Path(__file__).parent / "programs" / "ways_to_train.py"
WHOLE = ("overlap=False", "shards", "shards by size", "zero=1", "pipeline", "interleaved pipeline")


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    """What one rank has come to, once a test has asked for it."""
    return {}


def digests(run_ranks: Callable[..., object], ranks: int, backend: str) -> dict[str, str]:
    """Return what all ranks have come to, by the way to train."""
    job = run_ranks(ranks, PROGRAM, backend)
    of_rank = [dict(re.findall(r"(.+) = ([0-9a-f]{64})", "\n".join(job.lines(rank)))) for rank in range(ranks)]
    assert all(each == of_rank[0] for each in of_rank)
    return of_rank[0]


@pytest.fixture
def of_one_rank(alone, run_ranks):
    if not alone:
        alone.update(digests(run_ranks, 1, "gloo"))
    return alone


def test_one_rank_has_one_digest_for_all_divisions(of_one_rank):
    assert len(of_one_rank) > 25
    assert {of_one_rank[way] for way in WHOLE} == {of_one_rank["as whole models"]}
    assert {of_one_rank[way] for way in ("resumed", "resumed from shards")} == {of_one_rank["as whole models"]}
    assert of_one_rank["tied pipeline"] == of_one_rank["tied"]
    assert of_one_rank["clipped shards"] == of_one_rank["fused"]
    assert of_one_rank["fp16 shards"] == of_one_rank["fp16 whole models"]


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (3, "gloo"), (2, "nccl"), (3, "nccl")])
def test_ranks_that_share_a_gpu_have_the_digests_of_one_rank(run_ranks, of_one_rank, ranks, backend):
    assert digests(run_ranks, ranks, backend) == of_one_rank
