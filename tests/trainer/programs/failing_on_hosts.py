"""Train two models in turn, each rank on a host of its own, while steps fail in all ways: `failing_on_hosts.py FAILS`.

With FAILS=0, none does. It prints the digests of both.
"""

import os
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

os.environ["UNISONO_HOST"] = os.environ.get("RANK", "0")

import unisono
from unisono.errors import NonFiniteLossError, RankMismatchError

fails = sys.argv[1] == "1"
unisono.init()
rank, size = unisono.rank(), unisono.world_size()


def make(seed, width):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))
    optimizers = {
        "first": torch.optim.AdamW(model[0].parameters()),
        "last": torch.optim.SGD(model[2].parameters(), 0.1),
    }
    return unisono.Trainer(model, optimizers, virtual_ranks=6, progress=False)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def fails_here(model, batch):
    if rank == size - 1:
        raise ValueError("of the last rank alone")
    return loss(model, batch)


generator = torch.Generator().manual_seed(3)
data = TensorDataset(torch.randn(70, 8, generator=generator), torch.randint(0, 3, (70,), generator=generator))
trainers = [make(1, 5), make(2, 300)]
for batches in zip(*(trainer.batches(data, batch_size=12) for trainer in trainers), strict=True):
    for number, (trainer, batch) in enumerate(zip(trainers, batches, strict=True)):
        for name in ("first", "last"):
            if fails and batch.step % 2 == number:  # on all ranks, after the sums
                try:
                    trainer.step(lambda model, b: loss(model, b) * torch.inf, batch, optimizer=name)
                except NonFiniteLossError:
                    pass
                else:
                    raise AssertionError("no error")
            if fails and batch.step == 3 and size > 1:  # on one rank alone, which then makes the step after all
                try:
                    trainer.step(fails_here, batch, optimizer=name)
                except ValueError:
                    trainer.step(loss, batch, optimizer=name)
                continue
            if fails and batch.step == 4 and size > 1:  # other parameters on one rank
                bias = trainer.model[0 if name == "first" else 2].bias
                bias.requires_grad_(rank > 0)
                try:
                    trainer.step(loss, batch, optimizer=name)
                except RankMismatchError:
                    bias.requires_grad_(True)
                else:
                    raise AssertionError("no error")
            trainer.step(loss, batch, optimizer=name)
    trainers[0].evaluate(loss, data, batch_size=30)
print("digests", *(trainer.digest() for trainer in trainers), flush=True)
