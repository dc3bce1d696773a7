"""Train a model for some steps on every rank, and print the sum of the ranks' proportional set sizes in MB.

memory.py (shared | ddp) MODEL. "shared" is unisono.Trainer's engine; for both, large tensors lie on huge pages, as
`unisono run` has it for scripts with a Trainer.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.ddp import SUBJECTS
from bench.models import Subject, classify, optimizer_of
from bench.sides import TrainerSide

_STEPS = 12


def main(side: str, key: str) -> None:
    """Train, and print on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kept = _train(side, SUBJECTS[key]())
    dist.barrier()
    own = int(re.findall(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)[0])
    everyone: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if dist.get_rank() == 0:
        print(sum(everyone) / 1000)
    # DDP's reducer holds the group, and a group of gloo that ends with it may wait for ever: its thread wants the
    # interpreter's lock. So the reducer goes first.
    kept.clear()
    dist.destroy_process_group()


def _train(side: str, subject: Subject) -> list[object]:
    """Take some steps. Returns: what must stay while memory is looked at."""
    if side != "ddp":
        ranks = dist.get_world_size()
        trainer = TrainerSide(subject, virtual_ranks=ranks, shares=ranks, engine=side)
        for _ in range(_STEPS):
            trainer.step()
        return [trainer]
    torch.manual_seed(0)
    model = DistributedDataParallel(subject.build(), gradient_as_bucket_view=True)
    optimizer = optimizer_of(model)
    batch = subject.dataset(subject.batch_size).tensors
    for _ in range(_STEPS):
        optimizer.zero_grad(set_to_none=True)
        classify(model, batch).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [model, optimizer, batch]


main(*sys.argv[1:])
