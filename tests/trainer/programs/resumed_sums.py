"""A model one of whose layers only some shares use, with gradients that autograd adds to those of earlier shares.

Prints the digest, the losses, and how often a gradient came to a parameter that had that of an earlier share.
Usage: resumed_sums.py WAY
"""

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import unisono
from unisono.parallel import Pipeline, Shard

WIDTH = 640  # large enough for hooks, which take the gradients of the last share where ranks add up
WAYS = {
    "plain": {},
    "afterwards": {"overlap": False},
    "collective": {"engine": "collective"},
    "stages": {"parallel": Pipeline(stages=["last"], schedule="1f1b")},
    "zero-bubble": {"parallel": Pipeline(stages=["last"], schedule="zero-bubble")},
    "shards": {"parallel": Shard(by=["first", "side", "last"])},
    "workers": {"sync": unisono.LocalSGD(every=2, workers=2)},
}
found = []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.side, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = F.dropout(self.first(x).relu(), 0.1, self.training)
        if len(x) % 2:
            x = x + self.side(x)
        return self.last(x)


class Twice(Model):
    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.side, x, use_reentrant=True).relu()
        return self.last(x)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def note(parameter):
    def hook(gradient):
        if parameter.grad is not None:
            found.append(parameter)

    return hook


torch.manual_seed(0)
model = (Twice if sys.argv[1] == "twice" else Model)()
data = TensorDataset(torch.randn(126, WIDTH), torch.arange(126) % WIDTH)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
trainer = unisono.Trainer(
    model, optimizer, virtual_ranks=8, clip_grad_norm=1.0, progress=False, **WAYS.get(sys.argv[1], {})
)
if sys.argv[1] not in ("zero-bubble", "shards"):  # a hook changes how these compute
    for parameter in model.parameters():
        parameter.register_hook(note(parameter))
losses = []
for _ in trainer.epochs(1):
    for batch in trainer.batches(data, batch_size=21):
        losses.append(float(trainer.step(loss, batch)))
print(trainer.digest(), losses)
print(len(found))
