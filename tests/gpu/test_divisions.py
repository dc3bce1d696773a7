"""Models that are divided or cut over ranks, and ranks that differ: on GPUs as on CPUs, over gloo and over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(240)]
PROGRAMS = Path(__file__).parents[1] / "trainer" / "programs"
# Over NCCL ranks may share a GPU if they say that they are on separate hosts.
VARIABLES = {"gloo": {}, "nccl": {"NCCL_HOSTID": "{rank}", "NCCL_SOCKET_IFNAME": "lo"}}


@pytest.fixture(scope="module")
def divided_on_one_rank(fork_python):
    return fork_python(PROGRAMS / "divided.py", "whole")


@pytest.fixture(scope="module")
def cut_on_one_rank(fork_python):
    return fork_python(PROGRAMS / "cut.py", "1f1b", 1)


@pytest.mark.parametrize(
    ("ranks", "by"),
    [(2, "block"), (3, "named"), (3, "size"), (3, "zero1"), (4, "replicas"), (4, "size_replicas")],
)
@pytest.mark.parametrize("backend", VARIABLES)
def test_parts_of_ranks_change_no_bit(fork_ranks, divided_on_one_rank, ranks, by, backend):
    job = fork_ranks(ranks, PROGRAMS / "divided.py", by, variables=VARIABLES[backend])
    assert len(divided_on_one_rank) == 10
    assert [job.lines(rank) for rank in range(ranks)] == [divided_on_one_rank] * ranks


@pytest.mark.parametrize(
    ("ranks", "schedule", "stages"),
    [(2, "gpipe", "2"), (3, "auto", "auto3"), (4, "1f1b", "2"), (4, "zero-bubble", "4"), (2, "interleaved", "4")],
)
@pytest.mark.parametrize("backend", VARIABLES)
def test_stages_and_replicas_change_no_bit(fork_ranks, cut_on_one_rank, ranks, schedule, stages, backend):
    job = fork_ranks(ranks, PROGRAMS / "cut.py", schedule, stages, variables=VARIABLES[backend])
    assert len(cut_on_one_rank) == 7
    assert [job.lines(rank) for rank in range(ranks)] == [cut_on_one_rank] * ranks
