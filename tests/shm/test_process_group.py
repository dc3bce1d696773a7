"""Groups on shared memory beside gloo's: what every collective gives, and the life of groups from meeting to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.comm.shm import Options

PROGRAMS = Path(__file__).parent / "programs"


def test_every_collective_gives_what_gloo_gives(fork_ranks):
    job = fork_ranks(3, PROGRAMS / "like_gloo.py")
    assert job.lines() == ["compared 20 calls and 15 errors"]


LIFE = [
    "what_it_is",
    "threads_with_groups_of_their_own",
    "many_small_ones_in_flight",
    "groups_in_different_orders",
    "collectives_in_callbacks",
    "callbacks_keep_their_order",
    "callbacks_that_wait_for_others",
    "views_and_versions",
    "forked_children",
    "subgroups",
    "sizes",
    "leaves_nothing",
    "made_again",
]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_the_life_of_groups(run_ranks, ranks):
    job = run_ranks(ranks, PROGRAMS / "life.py")
    assert [line for line in job.lines(ranks - 1) if line in LIFE] == LIFE


@pytest.mark.parametrize("first", [pytest.param("unisono", marks=pytest.mark.soak), "nothing"])
def test_torch_knows_the_backend_whether_the_program_imports_unisono_or_not_and_it_may_end_at_once(first):
    code = f"""
import sys
{f"import {first}" if first != "nothing" else ""}
{"assert 'torch' not in sys.modules" if first == "unisono" else ""}
import torch.distributed as dist
assert "unisono.shm.process_group" not in sys.modules
assert "shm" in dist.Backend.backend_list
assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
dist.destroy_process_group()
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() != "shm", dist.get_backend()
dist.destroy_process_group()
if {first == "nothing"}:  # a program may end without destroying its groups, in the midst of collectives
    import torch
    dist.init_process_group("shm", store=dist.HashStore(), rank=0, world_size=1)
    works = [dist.all_reduce(torch.ones(1_000_000), async_op=True) for _ in range(10)]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_init_makes_the_backend_known_where_torch_does_not_look_for_it():
    code = """
import torch.distributed as dist, unisono
assert "shm" not in dist.Backend.backend_list
unisono.init("shm", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "shm"
"""
    environ = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environ)


def test_options_are_checked():
    with pytest.raises(ValueError, match="mib=0 must be at least 1"):
        Options(mib=0)
    assert Options.choose(None, {}) == Options(mib=None)
    assert Options.choose(None, {"UNISONO_SHM_MIB": "16"}) == Options(mib=16)
    assert Options.choose(Options(mib=8), {"UNISONO_SHM_MIB": "16"}) == Options(mib=8)
    with pytest.raises(ValueError, match="UNISONO_SHM_MIB='much'"):
        Options.choose(None, {"UNISONO_SHM_MIB": "much"})
    with pytest.raises(TypeError, match=r"unisono\.comm\.shm\.Options, not dict"):
        Options.choose({"mib": 3}, {})
