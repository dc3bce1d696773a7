"""A training loop of Lightning Fabric."""

import os

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp")
fabric.launch()
fabric.seed_everything(0, verbose=False)
inputs = torch.randn(64, 8)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8))
model = nn.Linear(8, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
total = fabric.all_reduce(torch.ones(1), reduce_op="sum")
assert fabric.world_size == total.item() == 2
assert loss < 0.5, loss
fabric.barrier()
print("trained as", fabric.global_rank)
