"""Trains a table; a rank gets no more memory when sums of gradients need a larger segment: `no_memory.py MARKER RANK`.

It does so once: a file, the marker, is there afterwards.
"""

import resource
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.embedding import SGD, Table, Tables, dense_parameters
from unisono.shm.segment import Segment

marker, rank = Path(sys.argv[1]), int(sys.argv[2])
create = Segment.create


def without_memory(nbytes, *, name):
    wanted = name == "unisono sparse gradients" and (trainer.steps_done, unisono.rank()) == (2, rank)
    if wanted and not marker.exists():
        marker.touch()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))
    return create(nbytes, name=name)


torch.manual_seed(0)
tables = Tables({"item": Table(rows=40_000, dim=16, optimizer=SGD(lr=0.1), pooling="mean")})
model = nn.Sequential(tables["item"], nn.Linear(16, 3))
# From the third step on, there are many rows.
ids = torch.cat([torch.full((64, 2000), 7), torch.arange(64 * 2000).view(64, 2000) % 40_000])
data = TensorDataset(ids, torch.arange(128) % 3)
Segment.create = without_memory


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


trainer = unisono.Trainer(model, torch.optim.SGD(dense_parameters(model), lr=0.1), virtual_ranks=2)
for batch in trainer.batches(data, batch_size=32, shuffle=False):
    trainer.step(loss, batch)
trainer.print("weights sha256:", trainer.digest())
