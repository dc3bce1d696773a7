"""Handwritten digits on several ranks: MNIST from a folder, or scikit-learn's small digits if there is none.

    unisono run -n 2 examples/notes/mnist.py --data folder/with/idx/files
    unisono run -n 2 examples/notes/mnist.py                               # digits

The folder has MNIST's four files (train-images-idx3-ubyte and so on), plain or with .gz. A batch of 64 on 4 ranks
is 16 for each. The accuracy is over the whole test set, each image once.
"""

import argparse
import gzip
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.metrics import Accuracy

parser = argparse.ArgumentParser(description="Recognise handwritten digits.")
parser.add_argument("--data", type=Path, help="folder with MNIST's IDX files")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=64, help="samples of all ranks together")
args = parser.parse_args()


def read_idx(name):
    """Read an IDX file: two zero bytes, the type (8: uint8), the number of dimensions, each as 4 bytes, the data."""
    path = args.data / name
    content = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no IDX file of bytes: it begins with {content[:4].hex()}")
    shape = [int.from_bytes(content[4 * d : 4 * d + 4], "big") for d in range(1, content[3] + 1)]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=4 + 4 * len(shape)).view(shape)


def load(part):
    images, labels = read_idx(f"{part}-images-idx3-ubyte"), read_idx(f"{part}-labels-idx1-ubyte")
    return TensorDataset(images.unsqueeze(1).float() / 255, labels.long())


job = unisono.init()

# 1. Data: all of it on every rank. Of scikit-learn's digits every fifth is kept for the test.
if args.data:
    train, test = load("train"), load("t10k")
else:
    digits = load_digits()
    images, labels = torch.tensor(digits.images).unsqueeze(1).float() / 16, torch.tensor(digits.target)
    held_out = torch.arange(len(labels)) % 5 == 4
    train, test = TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(images[held_out], labels[held_out])
unisono.print0(f"{len(train)} images to train on, {len(test)} to test")
batches = unisono.data.loader(train, args.batch_size)
tests = unisono.data.loader(test, batch_size=256, shuffle=False)

# 2. Model: the same on every rank.
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.Linear(512, 10),
).to(job.device)  # fmt: skip
unisono.parallel.replicate(model, loader=batches)  # right for unequal shares, too
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

# 3. Loop.
for epoch in range(args.epochs):
    for x, y in batches:
        loss = F.cross_entropy(model(x.to(job.device)), y.to(job.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    accuracy = Accuracy()
    with torch.no_grad():
        for x, y in tests:
            accuracy.update(model(x.to(job.device)), y.to(job.device))
    unisono.print0(f"epoch {epoch}: accuracy {accuracy.compute()}")
