"""A run whose loop does things between its batches and epochs: `between.py DIRECTORY [--stop WHERE] [--steps N]`.

It steps a ReduceLROnPlateau after each epoch, and with --teacher averages weights of its own after each step. Stopped
at a named place, it is to go on to the digest of a run that nobody stopped.
"""

import argparse
import os
import signal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser()
parser.add_argument("directory")
parser.add_argument("--stop")
parser.add_argument("--steps", type=int)
parser.add_argument("--every", type=int)
parser.add_argument("--teacher", action="store_true")
args = parser.parse_args()

generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(60, 8, generator=generator), torch.randint(0, 4, (60,), generator=generator))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.7)  # falls each time
teacher = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda mean, new, count: mean + 0.1 * (new - mean))


def loss(model, batch):
    stop("loss")
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def value(model, batch):
    stop("evaluation")
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def stop(where):
    """Stop here if it is the place: by an error, by a signal to this rank, or by one to rank 0 alone."""
    kind, _, place = (args.stop or "").partition(":")
    if place != f"{where}:{trainer.steps_done}":
        return
    if kind == "error":
        raise RuntimeError("the user's own")
    if kind == "break":
        raise StopIteration
    if kind != "main-term" or trainer.rank == 0:
        args.stop = None
        os.kill(os.getpid(), signal.SIGINT if kind == "int" else signal.SIGTERM)


trainer = unisono.Trainer(
    model,
    optimizer,
    virtual_ranks=4,
    directory=args.directory,
    stateful={"plateau": plateau, **({"teacher": teacher} if args.teacher else {})},
    checkpoints=unisono.Checkpoints(every_steps=args.every, every_minutes=None),
    progress=False,
)
trainer.print("begins at", trainer.epoch, trainer.steps_done)
for _epoch in trainer.epochs(3, max_steps=args.steps):
    for batch in trainer.batches(data, batch_size=20):
        trainer.step(loss, batch)
        stop("body")
        if args.teacher:
            teacher.update_parameters(model)
    stop("end")
    plateau.step(trainer.evaluate(value, data, name="loss"))
    stop("stepped")
trainer.print(
    "lr", optimizer.param_groups[0]["lr"], "teacher", float(sum(p.double().sum() for p in teacher.parameters())).hex()
)
trainer.print("weights sha256:", trainer.digest())
