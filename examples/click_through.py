"""Predict clicks from users, items and numbers; equal weights on any number of ranks.

    unisono run -n 2 examples/click_through.py      # about 30 s on two cores

A model like DLRM (Naumov et al. 2019): tables of vectors for what is chosen from many, a network for the numbers, dot
products of all pairs of vectors, and a network on top. The clicks are made up: a user has tastes, an item has traits,
and the probability of a click follows from both and from the numbers. So it is known how good a prediction can be at
all: the AUC of these probabilities. The last line does not change with -n.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import unisono
from unisono.embedding import Adam, Table, Tables, dense_parameters

parser = argparse.ArgumentParser(description="Predict clicks from users, items and numbers.")
parser.add_argument("--samples", type=int, default=200_000, help="made-up impressions, a tenth of them for the test")
parser.add_argument("--users", type=int, default=1000)
parser.add_argument("--items", type=int, default=500)
parser.add_argument("--dim", type=int, default=16, help="the length of a row")
parser.add_argument("--rate", type=float, default=0.05, help="the learning rate of the tables")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=2048, help="impressions of all ranks together")
args = parser.parse_args()

# 1. Data: few users and items have most of the impressions, as in real logs. The ids of users are hashes.
TASTES, PLACES, NUMBERS = 4, 8, 5
torch.manual_seed(0)
user = (args.users * torch.rand(args.samples) ** 2).long()
item = (args.items * torch.rand(args.samples) ** 2).long()
place, numbers = torch.randint(0, PLACES, (args.samples,)), torch.randn(args.samples, NUMBERS)
liked = (torch.randn(args.users, TASTES)[user] * torch.randn(args.items, TASTES)[item]).sum(1)
logit = liked + torch.randn(PLACES)[place] + (numbers @ torch.randn(NUMBERS)).tanh() - 1.5
clicked = torch.bernoulli(logit.sigmoid())
names = torch.randint(-(2**63), 2**63 - 1, (args.users,))
data = TensorDataset(names[user], item, place, numbers, clicked)
held_out = args.samples // 10
train, test = Subset(data, range(held_out, args.samples)), Subset(data, range(held_out))


# 2. Model: vectors of user, item, place and numbers; their dot products tell who likes what.
class ClickThrough(nn.Module):
    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 32), nn.ReLU(), nn.Linear(32, args.dim))
        self.top = nn.Sequential(nn.Linear(args.dim + 6, 32), nn.ReLU(), nn.Linear(32, 1))
        nn.init.normal_(tables["item"].weight, std=0.1)
        nn.init.normal_(tables["place"].weight, std=0.1)

    def forward(self, user, item, place, numbers):
        """The logit of a click for each sample."""
        dense = self.bottom(numbers)
        vectors = torch.stack(
            [dense, self.tables["user"](user), self.tables["item"](item), self.tables["place"](place)], 1
        )
        first, second = torch.tril_indices(4, 4, offset=-1)
        pairs = (vectors @ vectors.transpose(1, 2))[:, first, second]
        return self.top(torch.cat([dense, pairs], 1)).squeeze(1)


def loss(model, batch):
    *inputs, clicked = batch
    return F.binary_cross_entropy_with_logits(model(*inputs), clicked, reduction="none")


def predict(model, batch):
    return model(*batch[:-1])


def auc(scores, clicked):
    """The share of pairs of a click and a non-click of which the click has the higher score."""
    ranks = torch.empty(len(scores), dtype=torch.double)
    ranks[scores.argsort(stable=True)] = torch.arange(1.0, len(scores) + 1, dtype=torch.double)
    clicks = clicked.sum().double()
    return ((ranks[clicked > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(scores) - clicks))).item()


# 3. Loop.
tables = Tables({
    "user": Table(capacity=args.users, dim=args.dim, init_std=0.1, when_full="grow", optimizer=Adam(lr=args.rate)),
    "item": Table(rows=args.items, dim=args.dim, optimizer=Adam(lr=args.rate)),
    "place": Table(rows=PLACES, dim=args.dim, optimizer=Adam(lr=args.rate)),
})  # fmt: skip
model = ClickThrough(tables)
trainer = unisono.Trainer(model, torch.optim.AdamW(dense_parameters(model), lr=3e-3), virtual_ranks=8)
for epoch in trainer.epochs(args.epochs):
    for batch in trainer.batches(train, batch_size=args.batch_size):
        trainer.step(loss, batch)
    scores = trainer.predict(predict, test, batch_size=args.batch_size, to="all")
    trainer.print(f"epoch {epoch}: AUC {auc(scores, clicked[:held_out]):.4f}, {tables['user'].rows.count} users seen")
trainer.print(f"AUC of the true probabilities: {auc(logit[:held_out], clicked[:held_out]):.4f}")
trainer.print(f"AUC: {auc(scores, clicked[:held_out]):.4f}")
trainer.print("weights sha256:", trainer.digest())
