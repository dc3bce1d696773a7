"""A run that stops early and keeps its best: `early.py DIRECTORY ENGINE [DIE_AT PHASE]`; rank 0 is killed there.

Phases: "evaluated", "saving" (the checkpoint of the best is on disk, and not yet recorded), "recorded", "tagging".
"""

import os
import signal
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.state.checkpoint_work import CheckpointWork
from unisono.trainer import best_checkpoint

directory, engine, *rest = sys.argv[1:]
die_at, phase = (int(rest[0]), rest[1]) if rest else (-1, "")
generator = torch.Generator().manual_seed(0)
inputs, noise = torch.randn(100, 6, generator=generator), torch.randn(100, 3, generator=generator)
targets = (inputs[:, :3] + 2 * noise).argmax(1)  # some of it can be learned, and the rest only by heart
data, test = TensorDataset(inputs[:60], targets[:60]), TensorDataset(inputs[60:], targets[60:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def die(where, step):
    if os.environ.get("RANK", "0") == "0" and (where, step) == (phase, die_at):
        os.kill(os.getpid(), signal.SIGKILL)


def record(folder, best):
    die("saving", best.step)
    real_record(folder, best)
    die("recorded", best.step)


def rename(work):
    if work._final.name.startswith("tag-"):
        die("tagging", trainer.steps_done)
    real_rename(work)


real_record, best_checkpoint.write_best = best_checkpoint.write_best, record
real_rename, CheckpointWork._rename_durably = CheckpointWork._rename_durably, rename

trainer = unisono.Trainer(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.03),
    virtual_ranks=4,
    engine=engine,
    directory=directory,
    checkpoints=unisono.Checkpoints(every_steps=2, keep=1, best="loss", mode="min"),
    progress=False,
)
for _ in trainer.epochs(40):
    for batch in trainer.batches(data, batch_size=20):
        trainer.step(loss, batch)
    value = trainer.evaluate(loss, test, name="loss")
    die("evaluated", trainer.steps_done)
    if trainer.steps_done == 6:
        trainer.save(tag="six")
    if trainer.stalled("loss", patience=3):
        break
trainer.print("stopped", trainer.steps_done, trainer.digest())
trainer.print(trainer.load("best").source.rpartition("/")[2], trainer.digest())
