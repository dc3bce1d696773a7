"""Trains a model of P bytes whose parts may be kept in memory of the CPU, on a simulated device.

Prints what the device had at most while the Trainer was made, and in steps, and what it has between steps, in parts of
P, on the rank that takes most. Arguments: "built" or "given", settings of Shard, and "shares" for four shares on each
rank.
"""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono

BLOCKS, WIDTH = 16, 513
NBYTES = BLOCKS * (WIDTH + 1) * WIDTH * 4
how, *given = sys.argv[1:]
settings = {"offload": True} if "offload" in given else {}
settings |= {"zero": 1} if "zero1" in given else {}
settings |= {"sums": "divided"} if "sums" in given else {}
virtual_ranks = unisono.world_size() * (4 if "shares" in given else 1)


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def most():
    return torch.ops.simulated.peak_nbytes(0, True) / NBYTES


parallel = unisono.parallel.Shard(**settings)
model = unisono.parallel.build(make, parallel=parallel) if how == "built" else make()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=virtual_ranks, progress=False, parallel=parallel, clip_grad_norm=1.0
)
data = TensorDataset(torch.randn(48, WIDTH))
begun = most()
for _ in trainer.epochs(1):
    for number, batch in enumerate(trainer.batches(data, batch_size=12)):
        if number == 1:
            most()
        trainer.step(lambda model, batch: model(batch[0]).square().mean(1), batch)
    step, between = most(), torch.ops.simulated.allocated_nbytes(0) / NBYTES
begun, step, between = unisono.comm.all_reduce(torch.tensor([begun, step, between]), op="max").tolist()
print(f"made {begun:.2f}, steps {step:.2f}, between {between:.2f}")
