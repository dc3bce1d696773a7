"""Trains a model that may have been placed on the CPU in several parts; prints a digest, and what is refused.

Arguments: "whole", "placed" or "split".
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import unisono
from unisono.parallel import place, replicate

how = sys.argv[1]
torch.manual_seed(0)
x = torch.randn(40, 8)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
if how != "whole":
    placed = place(model, {"0": "cpu", "1": "cpu", "4": "cpu"}, split_size=5 if how == "split" else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
options = {"virtual_ranks": 2, "progress": False, "device": "cpu"}
trainer = unisono.Trainer(model, optimizer, clip_grad_norm=1.0, ema_decay=0.9, **options)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


for _epoch in trainer.epochs(2):
    for batch in trainer.batches(data, batch_size=16):
        trainer.step(loss, batch)
trainer.print(f"{trainer.evaluate(loss, data):.6f} {trainer.digest()}")

if how == "placed":
    for parallel in (None, unisono.parallel.Pipeline(stages=["4"])):
        other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        place(other, {"": "cpu", "4": "meta" if parallel is None else "cpu"})
        try:
            unisono.Trainer(other, torch.optim.SGD(other.parameters()), parallel=parallel, **options)
        except ValueError as error:
            trainer.print(error)

    # replicate() averages gradients over ranks, here of equal batches.
    gradients = []
    for split_size in (None, 4):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        if split_size:
            place(net, {"0": "cpu", "2": "cpu"}, split_size=split_size)
        replicas = replicate(net)
        net(x[:4]).square().mean().backward()
        gradients.append([parameter.grad for parameter in net.parameters()])
    equal = all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    if replicas.world_size > 1:
        try:
            place(net, {"": "cpu"})
        except ValueError as error:
            trainer.print(error)
    replicas.close()
    trainer.print("replicate", equal)
