"""Train with a Trainer and write down when each step ended: what bench/recovery.py disturbs."""

import os
import sys
import time
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

import unisono
from unisono.engine import EngineKind

folder, engine, steps = sys.argv[1], cast(EngineKind, sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(1024, 64), torch.randint(10, (1024,)))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
trainer = unisono.Trainer(model, optimizer, virtual_ranks=8, engine=engine, progress=False)


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss of each sample."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


with Path(folder, f"steps.{os.getpid()}").open("w", buffering=1) as stamps:
    for _ in trainer.epochs(steps, max_steps=steps):
        for batch in trainer.batches(data, batch_size=64):
            trainer.step(loss, batch)
            stamps.write(f"{time.monotonic()} {trainer.steps_done}\n")
            time.sleep(0.005)
