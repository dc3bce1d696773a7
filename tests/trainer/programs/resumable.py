"""A run that can be stopped anywhere: `resumable.py DIRECTORY [--steps N] [--die-at STEP --phase PHASE] [--every N]`.

Every rank dies by a signal, or fails, at the given step and phase. Each rank appends what it trained on to
DIRECTORY/dealt.txt.
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
parser.add_argument("--steps", type=int)
parser.add_argument("--die-at", type=int, default=-1)
parser.add_argument("--phase", choices=["loss", "after", "save", "error", "interrupt", "update", "term", "late-term"])
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--width", type=int, default=16)
parser.add_argument("--virtual-ranks", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--resume", default="auto")
parser.add_argument("--engine", default="auto")
args = parser.parse_args()


def die(phase):
    if args.phase == phase and trainer.steps_done == args.die_at:
        signals = {"term": signal.SIGTERM, "late-term": signal.SIGTERM, "interrupt": signal.SIGINT}
        os.kill(os.getpid(), signals.get(phase, signal.SIGKILL))


def loss(model, batch):
    die("loss")
    die("term")
    if args.phase == "error" and trainer.steps_done == args.die_at:
        raise RuntimeError("the user's own")
    return F.cross_entropy(model(batch[0] + 0.1 * torch.randn_like(batch[0])), batch[1], reduction="none")


generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(90, 8, generator=generator), torch.randint(0, 4, (90,), generator=generator))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, args.width), nn.BatchNorm1d(args.width), nn.Dropout(0.2), nn.Linear(args.width, 4))
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=0.01)
if args.phase == "update":
    steps_left = iter(range(args.die_at, -1, -1))
    optimizer.register_step_post_hook(lambda *_: next(steps_left) or 1 / 0)  # fails when the weights are written

optimizer.register_step_post_hook(lambda *_: die("late-term"))

trainer = unisono.Trainer(
    model,
    optimizer,
    seed=args.seed,
    virtual_ranks=args.virtual_ranks,
    scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15),
    ema_decay=0.9,
    autocast="fp16",
    directory=args.directory,
    resume=args.resume,
    engine=args.engine,
    checkpoints=unisono.Checkpoints(every_steps=args.every, keep=2),
    progress=False,
)
with open(f"{args.directory}/dealt.txt", "a") as dealt:  # noqa: PTH123
    for epoch in trainer.epochs(3, max_steps=args.steps):
        for batch in trainer.batches(data, batch_size=args.batch_size):
            trainer.step(loss, batch)
            indices = [i for share in batch.shares for m in share.micro_batches for i in m.indices]
            os.write(dealt.fileno(), f"{epoch} {batch.step} {trainer.rank} {indices}\n".encode())
            die("after")
            die("interrupt")
            if args.phase == "save" and trainer.steps_done == args.die_at:
                trainer.save()
                die("save")
trainer.print(
    "total", trainer.steps_done, "ema", float(trainer.evaluate(lambda m, b: m(b[0]).sum(1), data, ema=True)).hex()
)
trainer.print("weights sha256:", trainer.digest())
