"""TensorBoard: rank 0 writes what all ranks found together.

    pip install "unisono[tensorboard]"
    unisono run -n 2 examples/notes/tensorboard_on_rank_zero.py --folder runs/notes

A rank that logs its own loss shows one share of the batch, and ranks that write to one folder draw several curves
into one. So: average over the ranks first, which all of them must do, then write on rank 0.
"""

import argparse

import torch
from torch import nn

import unisono

parser = argparse.ArgumentParser(description="Write the loss of a small training to TensorBoard.")
parser.add_argument("--folder", default="runs/notes")
args = parser.parse_args()

unisono.init(device="cpu")
try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    unisono.print0('TensorBoard is not installed: pip install "unisono[tensorboard]"')
    raise SystemExit(0) from None
writer = SummaryWriter(args.folder) if unisono.is_main() else None

torch.manual_seed(0)
inputs = torch.randn(256, 4)
targets = inputs.sum(1, keepdim=True)
batches = unisono.data.loader(torch.utils.data.TensorDataset(inputs, targets), batch_size=32)
model = nn.Linear(4, 1)
unisono.parallel.replicate(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

step = 0
for _ in range(2):
    for x, y in batches:
        loss = (model(x) - y).square().mean() * batches.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = unisono.comm.all_reduce(loss.detach(), "mean")  # on every rank, also where nothing is written
        if writer is not None:
            writer.add_scalar("loss", mean.item(), step)
        step += 1
if writer is not None:
    writer.close()
    print(f"wrote {step} losses to {args.folder}; the last is {mean.item():.4f}")
