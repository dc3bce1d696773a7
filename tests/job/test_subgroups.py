"""Groups of some ranks: who is in them, in which order, and what happens where ranks disagree."""

from __future__ import annotations

from pathlib import Path

import pytest

import unisono

PROGRAM = Path(__file__).parent / "programs" / "subgroups.py"


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_subgroups_and_divisions_of_four_ranks_on_two_nodes(run_ranks, backend):
    job = run_ranks(4, PROGRAM, backend)
    for rank in range(4):
        assert job.lines(rank) == [f"ok {name}" for name in (
            "members", "division", "nodes", "refusals", "one_wrong", "absent"
        )]  # fmt: skip


def test_one_rank_divides_itself_without_a_launcher():
    with unisono.init():
        assert unisono.split(5).size() == 1
        assert unisono.split(by="node").size() == 1
        assert unisono.subgroup([0])
        with pytest.raises(ValueError, match="rank 1 is not in this job"):
            unisono.subgroup([1])


UNTOLD = """
import unisono
from datetime import timedelta
unisono.init(timeout=timedelta(seconds=20))
try:
    unisono.subgroup([0, 1], backend={"shm"} if unisono.rank() else "gloo")
except (TypeError, unisono.errors.PeerError) as error:
    print(type(error).__name__, error)
"""


def test_what_the_store_cannot_carry_is_told_to_all_ranks(fork_ranks):
    job = fork_ranks(2, UNTOLD)
    words = "Object of type set is not JSON serializable"
    assert job.lines(1) == [f"TypeError {words}"]
    assert job.lines(0) == [f"PeerError rank 1 could not call unisono.subgroup: TypeError: {words}"]


BOUND = """
import torch, torch.distributed as dist, unisono
unisono.init("gloo", timeout=20)
dist.group.WORLD.bound_device_id = torch.device("cuda", 0)  # as that of a job over NCCL is
for backend in ("shm", "gloo"):
    pair = unisono.subgroup([2, 0], backend=backend)
    if unisono.rank() != 1:
        dist.all_reduce(total := torch.ones(()) + unisono.rank(), group=pair)
        print(backend, pair.rank(), total.item())
print(dist.group.WORLD.bound_device_id)
"""


def test_a_group_of_another_backend_than_that_which_is_bound_to_gpus(fork_ranks):
    job = fork_ranks(3, BOUND)
    assert job.lines(0) == ["shm 1 4.0", "gloo 1 4.0", "cuda:0"]
    assert job.lines(1) == ["cuda:0"]
    assert job.lines(2) == ["shm 0 4.0", "gloo 0 4.0", "cuda:0"]
