"""Trains a table that is stored by its changed rows, until it is killed: `incremental.py DIRECTORY [KILL_AT_STEP]`."""

import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import Adam, Table, Tables, dense_parameters

directory, kill_at = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None
torch.manual_seed(0)
size = {"capacity": 20_000} if "dynamic" in directory else {"rows": 20_000}
tables = Tables({"item": Table(**size, dim=16, pooling="sum", optimizer=Adam(lr=0.1))})
model = nn.Sequential(tables["item"], nn.Linear(16, 3))
data = TensorDataset(torch.randint(0, 20_000, (96, 3)), torch.randint(0, 3, (96,)))
trainer = unisono.Trainer(
    model,
    torch.optim.AdamW(dense_parameters(model)),
    virtual_ranks=3,
    directory=directory,
    checkpoints=unisono.Checkpoints(every_steps=1, keep=2),
    progress=False,
)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


for batch in trainer.batches(data, batch_size=12):
    trainer.step(loss, batch)
    if trainer.steps_done == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
trainer.print("weights sha256:", trainer.digest())
