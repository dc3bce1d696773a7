"""Trainers that are used and dropped, in mid-run and after it: nothing stays of them. Prints "ok"."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import unisono

DATA = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().squeeze(1)


def train(steps: int) -> list[weakref.ref]:
    """Train for some steps and drop everything."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=sys.argv[1])
    for _ in trainer.epochs(2):
        for batch in trainer.batches(DATA, batch_size=16):
            trainer.step(loss, batch)
            steps -= 1
            if not steps:
                return [weakref.ref(model), weakref.ref(trainer)]
    return [weakref.ref(model), weakref.ref(trainer)]


found = []
for steps in (3, 100, 3, 100):
    dropped = train(steps)
    gc.collect()
    assert [each() for each in dropped] == [None, None], steps
    found.append(tuple(len(list(Path("/proc/self", each).iterdir())) for each in ("task", "fd")))
assert all(late <= early + 1 for early, late in zip(found[1], found[-1], strict=True)), found  # threads and open files
print("ok")
