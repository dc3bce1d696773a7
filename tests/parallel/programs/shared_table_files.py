"""Share a table that is in a file of the folder of the first argument, or in memory for "-", in a loop of one's own."""

import sys

import torch

import unisono
from unisono.embedding import Adam, Table, Tables
from unisono.parallel import share_tables

torch.manual_seed(0)
where = None if sys.argv[1] == "-" else sys.argv[1]
table = Table(rows=5000, dim=8, pooling="sum", optimizer=Adam(lr=0.1), init_std=0.1, directory=where)
tables = Tables({"item": table})
shared = share_tables(tables)
generator = torch.Generator().manual_seed(unisono.rank())
for _ in range(4):
    tables["item"](torch.randint(0, 5000, (40, 8), generator=generator)).square().sum().backward()
    shared.step()
if where is not None:
    assert tables["item"].file.is_shared and tables["item"].file.has(tables["item"].weight)
rows = tables["item"](torch.arange(5000).view(-1, 1)).detach()
print("sum", rows.double().sum().item())
