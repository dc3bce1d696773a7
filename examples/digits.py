"""Recognise handwritten digits; equal weights on any number of ranks.

    unisono run -n 2 examples/digits.py      # about 10 s on two cores

Trains a small convolutional network, with BatchNorm and Dropout, on the 1797 digits that scikit-learn carries.
The last line it prints does not change with -n. Try also: python examples/digits.py
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, random_split

import unisono

parser = argparse.ArgumentParser(description="Recognise handwritten digits.")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=128, help="samples of all ranks together")
parser.add_argument("--virtual-ranks", type=int, default=8, help="fixed shares of a batch, at least one a rank")
parser.add_argument("--directory", help="keep checkpoints and events here, and continue from here")
parser.add_argument("--checkpoint-every", type=int, metavar="STEPS", help="also save every so many steps")
parser.add_argument("--workers", type=int, default=0, help="processes that read data, for each rank")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, help="stop after so many steps in all")
args = parser.parse_args()

# 1. Data: the same on every rank; the Trainer deals it out.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
split = torch.Generator().manual_seed(0)
train, test = random_split(TensorDataset(images, labels), [1437, 360], generator=split)

# 2. Model: the same on every rank, too. It is not wrapped.
torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Dropout(0.25), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def loss(model, batch):
    """One loss per image."""
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def correct(model, batch):
    """Whether each image was recognised."""
    return model(batch[0]).argmax(1) == batch[1]


# 3. Loop.
trainer = unisono.Trainer(
    model,
    optimizer,
    seed=args.seed,
    virtual_ranks=args.virtual_ranks,
    directory=args.directory,
    checkpoints=unisono.Checkpoints(every_steps=args.checkpoint_every),
)
for _epoch in trainer.epochs(args.epochs, max_steps=args.steps):
    for batch in trainer.batches(train, batch_size=args.batch_size, workers=args.workers):
        trainer.step(loss, batch)
accuracy = trainer.evaluate(correct, test, name="accuracy")
trainer.print("test accuracy:", accuracy)
trainer.print("weights sha256:", trainer.digest())
