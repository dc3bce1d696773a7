"""A training loop of Hugging Face Accelerate."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
inputs = torch.randn(64, 8)
dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(dataset, batch_size=8, shuffle=True))
for _ in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
seen = accelerator.gather_for_metrics(torch.ones(1))
assert accelerator.num_processes == len(seen) == 2
assert loss < 0.5, loss
accelerator.print("trained on", accelerator.num_processes)
accelerator.end_training()
