"""Programs that know nothing of unisono, over shared memory by `--cpu-backend shm`: the same bits as over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

_PROGRAM = Path(__file__).parent / "programs" / "training.py"
_CASES = ("plain", "views_and_static_graph", "unused_parameters", "accumulation", "uneven_inputs", "hooks", "local_sgd",
          "zero", "shards", "saved_and_loaded", "tensors", "functions", "pipeline")  # fmt: skip


def test_training_over_shared_memory_gives_the_bits_of_gloo(run_ranks, tmp_path):
    # One test: each backend runs all cases in one job, for torch's imports take longer than they do.
    results = {}
    for backend, made_by in (("gloo", "ProcessGroup"), ("shm", "ProcessGroupShm")):
        folder = tmp_path / backend
        folder.mkdir()
        flags = ["--cpu-backend", backend, "--preload", "torch.distributed.pipelining"]  # imports most, once for both
        job = run_ranks(2, _PROGRAM, folder, flags=flags)
        for rank in (0, 1):
            *lines, last = job.lines(rank)
            assert last == f"made by {made_by}"
            results[backend, rank] = dict(line.split() for line in lines)
    assert tuple(results["gloo", 0]) == _CASES
    for rank in (0, 1):
        assert results["shm", rank] == results["gloo", rank]


_ASKS = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

asked = sys.argv[1:]
dist.init_process_group(*asked)
rank = dist.get_rank()
groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group(backend="gloo")]
groups += [init_device_mesh("cpu", (2,)).get_group(), dist.new_subgroups(1)[0]]
for group in groups:
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x[0] == dist.get_world_size(group)
names = {type(group).__name__ for group in groups}
assert names == {"ProcessGroupShm"}, names
wanted = asked[0] if asked else "undefined"
assert [dist.get_backend(group) for group in groups] == [wanted, wanted, "gloo", wanted, wanted]
assert dist.group.WORLD.name() == "shm"
if wanted == "gloo":
    dist.monitored_barrier()
found = [None, None]
dist.all_gather_object(found, {"rank": rank})
assert found == [{"rank": 0}, {"rank": 1}]
dist.destroy_process_group()
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
print("well")
"""


@pytest.mark.parametrize(
    ("asked", "start"),
    [
        ([], "fork"),
        (["gloo"], "fork"),
        (["cpu:gloo,cuda:nccl"], "fork"),
        pytest.param([], "spawn", marks=pytest.mark.soak),  # fresh interpreters: see test_process_group.py, too
    ],
)
def test_every_way_to_ask_leads_to_shared_memory(run_ranks, asked: list[str], start: str):
    job = run_ranks(2, _ASKS, *asked, flags=["--cpu-backend", "shm", "--start-method", start])
    assert job.lines(0) == job.lines(1) == ["well"]


_HANGS = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
def step():
    model(torch.ones(2, 4)).sum().backward()
step()
if dist.get_rank() == 0:
    step() if sys.argv[1] == "backward" else dist.all_reduce(torch.ones(3))
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("where", "said"),
    [
        pytest.param("call", "rank 0: all_reduce(float32[3], sum) at script.py:13", marks=pytest.mark.soak),
        ("backward", "rank 0: all_reduce(float32[20]) at script.py:10 in step"),
    ],
)
def test_a_hang_over_shared_memory_is_told_with_its_place(run_ranks, tmp_path, monkeypatch, where, said):
    monkeypatch.chdir(tmp_path)
    flags = ["--cpu-backend", "shm", "--hang-report", "1", "--hang-abort", "3"]
    job = run_ranks(2, _HANGS, where, code=None, flags=flags)
    assert job.code != 0
    assert "rank 0 has waited" in job.said and "in all_reduce for rank 1" in job.said, job.err
    assert said in job.said, job.err
