"""Teach a small network what a large one knows; equal weights on any number of ranks.

    unisono run -n 2 examples/distillation.py      # about 15 s on two cores

Trains a teacher on digits, and then a student of a tenth of its size to give the same answers (Hinton et al., 2015).
The teacher is in evaluation mode and is no part of the second Trainer. The last line does not change with -n.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

parser = argparse.ArgumentParser(description="Teach a small network what a large one knows.")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch-size", type=int, default=128, help="samples of all ranks together")
parser.add_argument("--temperature", type=float, default=3.0)
args = parser.parse_args()

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
train, test = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])

torch.manual_seed(0)
teacher = nn.Sequential(
    nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
)
student = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10))


def by_labels(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def by_teacher(model, batch):
    """The divergence from the teacher's softened answers, one per image, and how often both agree."""
    with torch.no_grad():
        answers = teacher(batch[0])
    own, t = model(batch[0]), args.temperature
    softened = F.kl_div(F.log_softmax(own / t, 1), F.log_softmax(answers / t, 1), reduction="none", log_target=True)
    return {"loss": t * t * softened.sum(1), "agreement": own.argmax(1) == answers.argmax(1)}


def correct(model, batch):
    return model(batch[0]).argmax(1) == batch[1]


def fit(model, loss, lr):
    trainer = unisono.Trainer(model, torch.optim.AdamW(model.parameters(), lr=lr), virtual_ranks=8)
    for _epoch in trainer.epochs(args.epochs):
        for batch in trainer.batches(train, batch_size=args.batch_size):
            result = trainer.step(loss, batch)
    return trainer, result, trainer.evaluate(correct, test, name="accuracy")


trainer, _, accuracy = fit(teacher, by_labels, lr=2e-3)
trainer.print("teacher:", accuracy)
teacher.eval()
trainer, result, accuracy = fit(student, by_teacher, lr=1e-2)
trainer.print("student:", accuracy)
trainer.print("agreement with the teacher in the last batch:", result.values["agreement"])
trainer.print("weights sha256:", trainer.digest())
