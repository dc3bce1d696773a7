"""Train tables in a loop of one's own beside `replicate`, and print their digest and sums: `shared_tables.py`."""

import os

import torch
from torch import nn
from torch.nn import functional as F

import unisono
from unisono.embedding import SGD, Adam, Table, Tables
from unisono.parallel import replicate, share_tables
from unisono.state.digest import digest

size = int(os.environ.get("WORLD_SIZE", "1"))
if size > 1:
    unisono.init()
rank = unisono.rank()
torch.manual_seed(rank)  # rows are rank 0's
tables = Tables(
    {
        "item": Table(rows=200, dim=4, pooling="sum", optimizer=Adam(lr=0.05)),
        "user": Table(capacity=500, dim=4, optimizer=SGD(lr=0.1)),
    }
)
torch.manual_seed(1)
dense = nn.Linear(8, 3)
replicas = replicate(dense) if size > 1 else None
shared = share_tables(tables)
optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(2)
all_ids = torch.randint(0, 400, (10, 64, 6), generator=generator)
all_labels = torch.randint(0, 3, (10, 64), generator=generator)
for batch, targets in zip(all_ids, all_labels, strict=True):
    ids, labels = batch.chunk(size)[rank], targets.chunk(size)[rank]
    found = torch.cat([tables["item"](ids % 200), tables["user"](ids[:, 0] * 7919)], 1)
    F.cross_entropy(dense(found), labels).backward()
    optimizer.step()
    shared.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in tables.parameters())
sums = [tables[name].weight.detach().double().sum().item() for name in tables]
print(f"weights sha256: {digest(tables.state_dict())}", tables.server_counts is not None, *sums)
