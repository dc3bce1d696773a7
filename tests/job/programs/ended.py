"""Jobs, groups and replicas, used and ended again and again: nothing stays of them. Prints "ok"."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import unisono
from unisono import comm
from unisono.parallel import replicate


def held() -> tuple[int, ...]:
    """Count the threads and the open files of this process."""
    gc.collect()
    return tuple(len(list(Path("/proc/self", each).iterdir())) for each in ("task", "fd"))


def train() -> weakref.ref[nn.Module]:
    model = nn.Linear(4, 1)
    replicate(model)  # the handle is dropped, and gradients are reduced as long as there are parameters
    model(torch.full((2, 4), float(unisono.rank()))).sum().backward()
    assert model.weight.grad.eq(1.0).all(), model.weight.grad
    return weakref.ref(model)


def use(group: dist.ProcessGroup | None) -> None:
    comm.all_reduce(torch.ones(3), group=group)
    comm.all_gather({"a": 1}, group=group)


for backend in ("gloo", "shm"):
    after_jobs = []
    for _ in range(3):
        with unisono.init(backend=backend):
            use(None)
            use(unisono.subgroup([0, 1]))
            model = train()
        after_jobs.append(held())
        assert model() is None, "the model is still there"
    assert all(late <= early + 1 for early, late in zip(after_jobs[1], after_jobs[-1], strict=True)), after_jobs
    after_groups = []
    with unisono.init(backend=backend):
        for _ in range(4):
            group = unisono.subgroup([0, 1])
            use(group)
            dist.destroy_process_group(group)
            del group
            after_groups.append(held())
    assert all(late <= early + 1 for early, late in zip(after_groups[1], after_groups[-1], strict=True)), after_groups
print("ok")
