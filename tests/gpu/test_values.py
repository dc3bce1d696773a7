"""Collectives, layers and wrappers give on GPUs what one process computes, over gloo and over NCCL."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROGRAMS = Path(__file__).parent / "programs"
CHECKS = (
    "collectives",
    "batch_norms",
    "replicas",
    "remote_module",
    "devices_of_one_process",
    "accuracy",
    "gradients_of_collectives",
)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_ranks_on_a_gpu_compute_what_one_process_does(run_ranks, ranks, backend):
    job = run_ranks(ranks, PROGRAMS / "values.py", backend)
    for rank in range(ranks):
        assert [line for line in job.lines(rank) if line.endswith(" ok")] == [f"{name} ok" for name in CHECKS]


def test_a_rank_that_fails_over_nccl_is_named_and_the_others_are_ended(run_ranks):
    job = run_ranks(2, PROGRAMS / "failing.py", code=1, flags=["--recover", "off"])
    assert "rank 1 failed: RuntimeError: no more data" in job.said
    assert "ended" in job.said


def test_ranks_that_wait_over_nccl_are_reported_with_the_lines_of_the_program(run_ranks):
    said = run_ranks(2, PROGRAMS / "late.py", flags=["--hang-report", "2"]).said
    for call in (r"Trainer\.step", "all_reduce"):
        line = rf"rank 0 has waited [\d.]+ s in {call} for rank 1 rank 0: {call}\([\w\[\], ]*\) at \S+late\.py:\d+"
        assert re.search(line, said)
    assert "time.sleep(5)" in said


def test_a_rank_in_place_of_another_that_is_late_is_reported(run_ranks, tmp_path):
    job = run_ranks(2, PROGRAMS / "late_newcomer.py", tmp_path, flags=["--hang-report", "2"])
    assert [job.lines(rank) for rank in range(2)] == [["steps 4, new False"], ["steps 4, new True"]]
    assert re.search(r"rank 0 has waited [\d.]+ s in Trainer\.step for rank 1", job.said)
    assert "time.sleep(5)" in job.said


def test_ranks_that_share_a_gpu_take_gloo_and_say_so(run_ranks):
    job = run_ranks(2, "import unisono\nprint(unisono.init().backend, unisono.init().device)\n")
    assert job.lines(1) == ["gloo cuda:0"]
    assert "ranks 0-1 share a GPU, which nccl does not serve, so the backend is gloo" in job.said


def test_a_script_that_asks_for_nccl_is_refused_more_ranks_than_gpus(run_ranks):
    ranks = torch.cuda.device_count() + 1
    job = run_ranks(ranks, "import torch.distributed as dist\ndist.init_process_group('nccl')\n", code=None)
    assert job.code
    assert "asks for nccl, which needs a GPU for every rank, and this machine has" in job.said


def test_a_job_has_a_rank_for_each_gpu(run_ranks):
    job = run_ranks("gpu", "import unisono\nprint(unisono.world_size(), unisono.init().device.type)\n")
    assert job.lines(0)[-1] == f"{torch.cuda.device_count()} cuda"


def test_memory_that_a_gpu_lacks_is_reported_with_what_to_do(run_ranks):
    job = run_ranks(1, "import torch\ntorch.empty(2**50, device='cuda')\n", code=1)
    assert "OutOfMemoryError: CUDA out of memory" in job.said
    assert "make batches smaller or accumulate gradients" in job.said
