"""What `unisono plan` is given in tests, right and wrong."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 64


def build(model=None, loss_fn=None):
    model = model or nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)])
    data = [(torch.zeros(WIDTH), 1)]
    return model, torch.optim.AdamW(model.parameters()), loss_fn or cross_entropy, data


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def build_large():
    """50 GB of weights, which are never there."""
    model, _, *others = build(nn.Sequential(nn.Linear(WIDTH, 10**8), nn.Linear(10**8, WIDTH)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), *others  # has few operations to measure


def build_three():
    return build()[:3]


def build_broken():
    return build(nn.Linear(WIDTH, "ten"))


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.layer(x)
        if x.mean() > 0:  # the line that is named
            x = -x
        return x


def build_branching():
    return build(Branching())


def build_without_loss():
    return build(loss_fn=lambda model, batch: None)


def build_other_optimizer():
    model, _, loss_fn, data = build()
    return model, torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), loss_fn, data


def build_failing_in_steps():
    steps = []

    def loss(model, batch):
        steps.append(batch)
        if len(steps) > 8 and not isinstance(batch[0], torch._subclasses.FakeTensor):
            raise ValueError("in the second step")
        return cross_entropy(model, batch)

    return build(loss_fn=loss)


NOT_A_FUNCTION = 3


def build_sparse():
    return build(nn.Sequential(nn.EmbeddingBag(100, WIDTH, sparse=True), nn.Linear(WIDTH, 10)))
