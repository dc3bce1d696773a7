"""Match images and their captions; equal weights on any number of ranks.

    unisono run -n 2 examples/clip.py      # about 20 s on two cores

CLIP (Radford et al., 2021) in small: one tower reads images of digits, the other their names in words, byte by byte. An
image must find its caption among those of the global batch, and a caption its image. The temperature is learned. The
last line does not change with -n.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description="Match images and their captions.")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=96, help="pairs of all ranks together")
parser.add_argument("--steps", type=int, help="stop after so many steps in all")
args = parser.parse_args()

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LENGTH = 24
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)


def read(text):
    return torch.tensor([*text.encode().ljust(LENGTH)])


captions = torch.stack([read(f"the digit {NAMES[label]}") for label in labels])
train = TensorDataset(images[:1437], captions[:1437], labels[:1437])
test = TensorDataset(images[1437:], labels[1437:])


class TwoTowers(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(512, width),
        )  # fmt: skip
        self.bytes, self.places = nn.Embedding(256, 48), nn.Parameter(0.02 * torch.randn(LENGTH, 48))
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.1, batch_first=True)
        self.text = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.out = nn.Linear(48, width)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def encode_image(self, x):
        return F.normalize(self.image(x))

    def encode_text(self, x):
        return F.normalize(self.out(self.text(self.bytes(x) + self.places).mean(1)))


def encode(model, batch):
    return {"image": model.encode_image(batch[0]), "text": model.encode_text(batch[1]), "label": batch[2]}


def match(model, pairs):
    """Cross entropy over the whole batch in both directions; all pairs of one digit count as right."""
    scores = model.scale.exp() * pairs["image"] @ pairs["text"].T
    right = (pairs["label"][:, None] == pairs["label"]).float()
    right = right / right.sum(1, keepdim=True)
    return (F.cross_entropy(scores, right, reduction="none") + F.cross_entropy(scores.T, right, reduction="none")) / 2


def recognised(model, batch):
    """Classify by the nearest caption, of which none has been trained as a class."""
    names = model.encode_text(torch.stack([read(f"the digit {name}") for name in NAMES]))
    return (model.encode_image(batch[0]) @ names.T).argmax(1) == batch[1]


torch.manual_seed(0)
model = TwoTowers()
trainer = unisono.Trainer(model, torch.optim.AdamW(model.parameters(), lr=2e-3), virtual_ranks=8, clip_grad_norm=1.0)
for _epoch in trainer.epochs(args.epochs, max_steps=args.steps):
    for batch in trainer.batches(train, batch_size=args.batch_size):
        trainer.step(match, batch, encode=encode)
trainer.print("digits recognised by their names:", trainer.evaluate(recognised, test, name="recognised"))
trainer.print("weights sha256:", trainer.digest())
