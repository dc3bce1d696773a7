"""Trains models that are drawn at random, with sums of gradients that are divided over ranks; prints a digest of each.

Arguments: "whole" for models that are not divided, or "divided"; the number of ranks for which settings are drawn, and
seeds.
"""

import contextlib
import random
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

how, most, *seeds = sys.argv[1:]
MOST = int(most)


class Net(nn.Module):
    """Blocks with buffers and dropout, tied weights, and a parameter that few samples use."""

    def __init__(self, draw):
        super().__init__()
        width = draw.choice([8, 21, 130])
        self.ends = nn.Parameter(torch.randn(width, 6) / 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Dropout(0.2))
            for _ in range(draw.randint(1, 4))
        )
        self.layers[-1][0].weight = self.layers[0][0].weight
        self.seldom = nn.Parameter(torch.zeros(6))
        self.skips = draw.random() < 0.5

    def forward(self, x):
        y = torch.tanh(F.linear(x, self.ends))
        for layer in self.layers[: 1 + bool(x[0, 0] > 0)] if self.skips else self.layers:
            y = y + layer(y)
        y = F.linear(y, self.ends.t())
        return y * self.seldom if x[0, 1] > 1 else y


def loss(model, batch):
    losses = (model(batch[0]) - batch[0].flip(1)).square().mean(1)
    return {"loss": losses, "most": losses.detach().abs()}


def parallel_of(draw):
    """Draw a division, also if none is asked for."""
    settings = draw.choice(
        [{"unit_bytes": 1}, {"unit_bytes": 3000}, {}, {"by": "size", "unit_bytes": 900}, {"zero": 1}, {"offload": True}]
    )
    if "zero" not in settings and MOST % 2 == 0 and draw.random() < 0.5:
        settings = {**settings, "replicas": 2}
    return unisono.parallel.Shard(**settings, sums="divided") if how == "divided" else None


def train(seed):
    draw = random.Random(seed)
    virtual_ranks = draw.randint(MOST, 3 * MOST + 1)
    batch_size = virtual_ranks * draw.randint(1, 3) + draw.randint(0, 2)
    torch.manual_seed(seed)
    model = Net(draw)
    data = TensorDataset(torch.randn(2 * batch_size + draw.randint(1, batch_size), 6))
    options = draw.choice([{}, {"autocast": "bf16"}, {"autocast": "fp16"}, {"overlap": False}, {"ema_decay": 0.9}])
    optimizer = draw.choice(
        [
            lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
            lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        ]
    )
    inner = [*model.layers.parameters()]
    outer = [p for p in model.parameters() if not any(p is each for each in inner)]
    several = draw.random() < 0.4
    optimizers = {"inner": optimizer(inner), "outer": optimizer(outer)} if several else optimizer(model.parameters())
    parallel = parallel_of(draw)
    trainer = unisono.Trainer(
        model, optimizers, virtual_ranks=virtual_ranks, seed=seed, progress=False, parallel=parallel,
        clip_grad_norm=draw.choice([None, 0.5]), **options,
    )  # fmt: skip
    micro_batch_size, frozen, found = draw.choice([None, 1]), draw.random() < 0.5, []
    for epoch in trainer.epochs(2):
        for p in model.layers[0].parameters():
            p.requires_grad_(not frozen or epoch > 0)
        for batch in trainer.batches(data, batch_size=batch_size, micro_batch_size=micro_batch_size):
            result = trainer.step(loss, batch, optimizer="outer" if several and batch.step == 1 else None)
            found.append((float(result), result.grad_norm, {k: float(v) for k, v in result.values.items()}))
        found.append({k: float(v) for k, v in trainer.evaluate(loss, data, batch_size=virtual_ranks + 3).items()})
        outputs = trainer.predict(lambda model, batch: model(batch[0]), data, batch_size=virtual_ranks + 1, to="all")
        found.append(outputs.tolist())
    found += [(name, buffer.tolist()) for name, buffer in model.named_buffers()]
    print(f"seed {seed}, {virtual_ranks} virtual ranks: {trainer.digest()} {found}")


with contextlib.suppress(ImportError):
    import numpy  # noqa: F401  seeds are set for it, too
for each in seeds:
    train(int(each))
