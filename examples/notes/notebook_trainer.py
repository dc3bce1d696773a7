"""The Trainer class of the notebook, without the parts that only distribute.

    unisono run -n 2 examples/notes/notebook_trainer.py          # 32 steps an epoch
    python examples/notes/notebook_trainer.py                    # 64 steps an epoch

2048 samples of 20 features in batches of 32 for each rank. No wrapper, no sampler, no set_epoch, no device numbers;
the same script on one rank, on several and on GPUs.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import unisono


class Samples(Dataset):
    def __init__(self, size):
        numbers = torch.Generator().manual_seed(0)  # the same data on every rank
        self.data = [(torch.rand(20, generator=numbers), torch.rand(1, generator=numbers)) for _ in range(size)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, batches, optimizer, job):
        self.model, self.batches, self.optimizer, self.job = model, batches, optimizer, job
        unisono.parallel.replicate(model, loader=batches)

    def run_batch(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run_epoch(self):
        for inputs, targets in self.batches:
            loss = self.run_batch(inputs.to(self.job.device), targets.to(self.job.device))
        return loss

    def train(self, max_epochs):
        batch_size = len(next(iter(self.batches))[0])  # a look at one batch uses up no epoch
        for epoch in range(max_epochs):
            print(f"[rank {self.job.rank}] epoch {epoch} | batch size {batch_size} | steps {len(self.batches)}")
            loss = self.run_epoch()
        unisono.print0(f"last loss: {unisono.comm.all_reduce(loss, 'mean').item():.2f}")


parser = argparse.ArgumentParser(description="Train a linear model on random numbers.")
parser.add_argument("--max-epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=32, help="samples of one rank")
args = parser.parse_args()

job = unisono.init()
batches = unisono.data.loader(Samples(2048), batch_size=args.batch_size * job.world_size)
model = nn.Linear(20, 1).to(job.device)
trainer = Trainer(model, batches, torch.optim.SGD(model.parameters(), lr=1e-1), job)
trainer.train(args.max_epochs)
