"""A run of a model that is divided over ranks, with a directory.

Arguments: the directory; "block", "sums", the names of blocks, "stages:", "zero1:" or "zero3:" and the beginnings of
stages, or "" to leave the model whole; and options: max_steps=N ends early; term=N sends SIGTERM to the launcher at
step N; die=N kills rank 1 there once; by_time saves by time alone; best keeps the best checkpoint. All export their
weights after step 3, and load them after step 6.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.launch.control import running_jobs

folder, how, *rest = sys.argv[1:]
options = dict(each.partition("=")[::2] for each in rest)


def parallel():
    kind, _, names = how.partition(":")
    if kind in ("stages", "zero1", "zero3"):
        zero = None if kind == "stages" else int(kind[-1])
        replicas = 2 if unisono.world_size() == 4 else None
        return unisono.parallel.Pipeline(stages=names.split(","), zero=zero, replicas=replicas)
    if how in ("block", "sums"):
        return unisono.parallel.Shard(unit_bytes=1, sums="divided" if how == "sums" else "whole")
    return unisono.parallel.Shard(by=how.split(",")) if how else None


def launcher():
    process, launchers = os.getpid(), running_jobs()
    while process not in launchers:
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return process


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x + self.dropout(self.norm(self.linear(x)))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


model = unisono.parallel.build(make_model, parallel=parallel()) if "build" in options else make_model()
X = torch.randn(24, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
policy = {"every_minutes": 1e-5} if "by_time" in options else {"every_steps": 4}
if "best" in options:
    policy |= {"best": "evaluation", "mode": "min"}
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=4, directory=folder, progress=False, clip_grad_norm=1.0,
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    checkpoints=unisono.Checkpoints(keep=2, **policy),
    parallel=parallel(),
)  # fmt: skip
begun = trainer.steps_done


def loss(model, batch):
    return (model(batch[0]) - batch[0].flip(1)).square().mean(1)


for _ in trainer.epochs(3, max_steps=int(options["max_steps"]) if "max_steps" in options else None):
    for batch in trainer.batches(TensorDataset(X), batch_size=8):
        trainer.step(loss, batch)
        if trainer.steps_done == 3:
            trainer.export(Path(folder) / "weights.safetensors")
        if trainer.steps_done == 6:
            trainer.load(Path(folder) / "weights.safetensors")
        if trainer.steps_done == int(options.get("term", -1)) and trainer.is_main:
            os.kill(launcher(), signal.SIGTERM)
            time.sleep(0.5)  # until it comes to the ranks: four steps are all that is left
        if trainer.steps_done == int(options.get("die", -1)) and trainer.rank == 1:
            once = Path(folder) / "died"
            if not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    trainer.evaluate(loss, TensorDataset(X), batch_size=8)
found = "built" if "build" in options else trainer.digest()
print(f"from {begun} to {trainer.steps_done}: {found} {[float(block.calls) for block in model]}")
