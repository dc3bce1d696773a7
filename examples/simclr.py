"""Learn what digits look like without labels; equal weights on any number of ranks.

    unisono run -n 2 examples/simclr.py      # about 20 s on two cores

SimCLR (Chen et al., 2020) on the digits that scikit-learn carries: two distorted views of an image must find each other
among all views of the global batch. Then a linear classifier is fitted to the features. The last line does not change
with -n.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description="Learn what digits look like without labels.")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=256, help="images of all ranks together")
parser.add_argument("--recompute", action="store_true", help="encode twice, for the memory of one micro-batch")
parser.add_argument("--temperature", type=float, default=0.2)
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train, test = TensorDataset(images[:1437]), TensorDataset(images[1437:])

torch.manual_seed(0)
model = nn.ModuleDict({
    "features": nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(),
    ),
    "projection": nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)),
})  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)


def distorted(x):
    """Shift, scale and hide a part: drawn anew for each image, and alike on any number of ranks."""
    theta = torch.eye(2, 3).repeat(len(x), 1, 1)
    theta[:, :, 2] = 0.4 * torch.rand(len(x), 2) - 0.2
    theta[:, :, :2] += 0.4 * torch.rand(len(x), 2, 2) - 0.2
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.dropout(F.grid_sample(x, grid, align_corners=False), 0.1) + 0.05 * torch.randn_like(x)


def encode(model, batch):
    """The two views of each image of a micro-batch."""
    views = [model["projection"](model["features"](distorted(batch[0]))) for _ in range(2)]
    return tuple(F.normalize(view) for view in views)


def contrast(model, views):
    """Each view must tell its partner from all other views of the global batch."""
    n = len(views[0])
    z = torch.cat(views)
    scores = z @ z.T / args.temperature
    scores = scores.masked_fill(torch.eye(2 * n, dtype=torch.bool), -torch.inf)
    partner = torch.arange(2 * n).roll(n)
    losses = F.cross_entropy(scores, partner, reduction="none").view(2, n).mean(0)
    return {"loss": losses, "found": (scores.argmax(1) == partner).float().view(2, n).mean(0)}


trainer = unisono.Trainer(model, optimizer, virtual_ranks=8)
for _epoch in trainer.epochs(args.epochs):
    for batch in trainer.batches(train, batch_size=args.batch_size):
        result = trainer.step(contrast, batch, encode=encode, recompute=args.recompute)
trainer.print(f"partners found in the last batch: {result.values['found']:.3f}")

model.eval()
with torch.no_grad():
    features = model["features"](images)
classifier = LogisticRegression(max_iter=1000).fit(features[:1437], labels[:1437])
trainer.print(f"accuracy of a linear classifier: {classifier.score(features[1437:], labels[1437:]):.4f}")
trainer.print("weights sha256:", trainer.digest())
