"""A run of a model that is cut, with a directory. Arguments: the directory, the stages ("" for none), and options.

Options: max_steps=N ends early; term=N sends SIGTERM to the launcher at step N; die=N kills rank 1 there once; reset=N
resets the statistics of all layers there;
by_time saves by time alone; best keeps the best checkpoint.
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

folder, stages, *rest = sys.argv[1:]
options = dict(each.partition("=")[::2] for each in rest)


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


torch.manual_seed(0)
model = nn.Sequential(*(Block() for _ in range(4)))
X = torch.randn(24, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
policy = {"every_minutes": 1e-5} if "by_time" in options else {"every_steps": 4}
if "best" in options:
    policy |= {"best": "evaluation", "mode": "min"}
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=4, directory=folder, progress=False, ema_decay=0.8, clip_grad_norm=1.0,
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    checkpoints=unisono.Checkpoints(keep=2, **policy),
    parallel=unisono.parallel.Pipeline(stages=stages.split(",")) if stages else None,
)  # fmt: skip
begun = trainer.steps_done


def loss(model, batch):
    return (model(batch[0]) - batch[0].flip(1)).square().mean(1)


for _ in trainer.epochs(3, max_steps=int(options["max_steps"]) if "max_steps" in options else None):
    for batch in trainer.batches(TensorDataset(X), batch_size=8):
        trainer.step(loss, batch)
        if trainer.steps_done == int(options.get("term", -1)) and trainer.is_main:
            os.kill(launcher(), signal.SIGTERM)
            time.sleep(0.5)  # until it comes to the ranks: four steps are all that is left
        if trainer.steps_done == int(options.get("reset", -1)):
            for block in model:
                block.norm.reset_running_stats()
        if trainer.steps_done == int(options.get("die", -1)) and trainer.rank == 1:
            once = Path(folder) / "died"
            end_s = time.monotonic() + 20  # this rank writes its part in the background
            while not (Path(folder) / "checkpoints" / "step-000000003").exists() and time.monotonic() < end_s:
                time.sleep(0.01)
            if not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    trainer.evaluate(loss, TensorDataset(X), batch_size=8)
print(f"from {begun} to {trainer.steps_done}: {trainer.digest()} {[float(block.calls) for block in model]}")
