"""A script for torchrun and DistributedDataParallel, as everybody writes it, under `unisono run`. Nothing is changed.

    unisono run -n 2 examples/notes/ddp_as_ever.py
    torchrun --nproc-per-node 2 examples/notes/ddp_as_ever.py

The pieces are the usual ones: process group, sampler, DDP, set_epoch, saving model.module on rank 0. The other
scripts of this folder show what each of them is for, and what unisono has in its place.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

# 1. Processes: the launcher has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
dist.init_process_group("gloo")  # "nccl" on GPUs, with torch.cuda.set_device(local_rank)
rank = dist.get_rank()

# 2. Data: each rank reads its part. The DataLoader's batch_size is that of one rank.
torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs.sum(1, keepdim=True)
dataset = TensorDataset(inputs, targets)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

# 3. Model: DDP averages gradients while backward computes them.
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for epoch in range(5):
    sampler.set_epoch(epoch)  # or every epoch has the same order
    for x, y in loader:
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"last loss of this rank below 0.01: {loss.item() < 0.01}")

# 4. All ranks have the same weights now, so one of them saves.
weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.data)
print("weights equal on all ranks:", all(torch.equal(w, weights[0]) for w in weights))
if rank == 0:
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.module.state_dict(), Path(folder) / "model.pt")
        print("saved:", ", ".join(torch.load(Path(folder) / "model.pt")))
dist.barrier()
dist.destroy_process_group()
