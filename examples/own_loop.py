"""Recognise digits in a loop of your own, which writes its run down: with DDP, and without a Trainer.

    unisono run -n 2 examples/own_loop.py --directory runs/own --epochs 500     # half a minute on two cores
    unisono top                                                                 # meanwhile, in another terminal
    unisono report runs/own                                                     # a page with its curves

Loss and accuracy are means over the samples of all ranks, so that the curves do not depend on rank 0's share. It also
runs alone, by `python examples/own_loop.py`, and under torchrun.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset, random_split

import unisono
from unisono.metrics import Accuracy, Mean, Metrics

parser = argparse.ArgumentParser(description="Recognise digits in a loop of your own.")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=128, help="samples of all ranks together")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--directory", help="write the events of the run here")
args = parser.parse_args()

# 1. Processes, and data that is dealt to them.
job = unisono.init()
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
split = torch.Generator().manual_seed(0)
train, test = random_split(TensorDataset(images, labels), [1437, 360], generator=split)
batches = unisono.data.loader(train, batch_size=args.batch_size)
tests = unisono.data.loader(test, batch_size=args.batch_size, shuffle=False)

# 2. Model.
torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)).to(job.device)
model = DistributedDataParallel(plain) if dist.is_initialized() else plain
optimizer = torch.optim.AdamW(plain.parameters(), lr=args.lr)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(batches))

# 3. Loop. An exception that leaves the block is the end of the run in the log.
settings = {**vars(args), "optimizer": "AdamW"}
with unisono.RunLog(args.directory, steps=args.epochs * len(batches), settings=settings) as log:
    for epoch in range(args.epochs):
        model.train()
        for batch in batches:
            x, y = (each.to(job.device) for each in batch)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            (loss * batches.weight).backward()  # ranks may have different numbers of samples
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 5.0)
            optimizer.step()
            meter = Metrics(loss=Mean())
            meter.update(loss=(loss.detach(), len(y)))
            mean = meter.compute()["loss"]
            (lr,) = schedule.get_last_lr()
            log.step(loss=float(mean), samples=int(mean.count), lr=lr, grad_norm=norm, epoch=epoch)
            schedule.step()
        model.eval()
        meters = Metrics(loss=Mean(), accuracy=Accuracy())
        with torch.no_grad():
            for batch in tests:
                x, y = (each.to(job.device) for each in batch)
                scores = plain(x)
                meters.update(loss=(F.cross_entropy(scores, y), len(y)), accuracy=(scores, y))
        values = meters.compute()
        log.evaluation("test", loss=float(values["loss"]), accuracy=float(values["accuracy"]))

unisono.print0(f"test accuracy: {values['accuracy']}")
