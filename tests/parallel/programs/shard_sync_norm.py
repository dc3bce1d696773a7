"""A divided model with SyncBatchNorm, whose forward pass exchanges statistics: prints what one process prints."""

import os
import sys

import torch
from torch import nn

import unisono

unisono.init()
torch.set_num_threads(1)
torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)]
model = unisono.parallel.convert_sync_batchnorm(nn.Sequential(*blocks, nn.Linear(8, 1)))
model.to(device := os.environ.get("DEVICE", "cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sharded = unisono.parallel.shard(model, optimizer, parallel=unisono.parallel.Shard(by=sys.argv[1]))
x = torch.randn(12, 8).chunk(unisono.world_size())[unisono.rank()].to(device)
for _ in range(4):
    with sharded.step():
        sharded.backward(model(x).square().mean())
    print(f"{sharded.loss:.5f}")
with sharded.whole():
    print([f"{b.double().sum():.4f}" for b in model.buffers()])
