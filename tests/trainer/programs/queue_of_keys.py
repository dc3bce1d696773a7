"""Momentum contrast: the keys of past batches in a queue that is state of the run.

Arguments: the engine, a folder for checkpoints, and the number of steps after which to stop.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

images = TensorDataset(torch.randn(30, 6, generator=torch.Generator().manual_seed(1)))


class Queue:
    """The newest keys first."""

    def __init__(self, size):
        self.rows = F.normalize(torch.randn(size, 5), dim=1)
        self.coming = None

    def push(self):
        self.rows = torch.cat([self.coming, self.rows])[: len(self.rows)]

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


torch.manual_seed(0)
models = {
    name: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)) for name in ("query", "key")
}
models["key"].load_state_dict(models["query"].state_dict())
models["key"].requires_grad_(False)
queue = Queue(20)


def encode(models, batch):
    with torch.no_grad():
        key = models["key"](batch[0] + 0.1 * torch.randn(batch[0].shape))
    query = models["query"](batch[0] + 0.1 * torch.randn(batch[0].shape))
    return {"query": F.normalize(query, dim=1), "key": F.normalize(key, dim=1)}


def contrast(models, encodings):
    query, queue.coming = encodings["query"], encodings["key"].detach()
    positive = (query * queue.coming).sum(1, keepdim=True)
    scores = torch.cat([positive, query @ queue.rows.T], 1) / 0.2
    return F.cross_entropy(scores, torch.zeros(len(query), dtype=torch.long), reduction="none")


def main() -> None:
    trainer = unisono.Trainer(
        models,
        torch.optim.SGD(models["query"].parameters(), lr=0.1),
        virtual_ranks=4,
        engine=sys.argv[1],
        directory=sys.argv[2] if len(sys.argv) > 2 else None,
        stateful={"queue": queue},
        progress=False,
    )
    for _ in trainer.epochs(2, max_steps=int(sys.argv[3]) if len(sys.argv) > 3 else None):
        for batch in trainer.batches(images, batch_size=8):
            trainer.step(contrast, batch, encode=encode)
            queue.push()
            with torch.no_grad():
                for slow, fast in zip(models["key"].parameters(), models["query"].parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
    trainer.print("queue:", float(queue.rows.double().sum()))
    trainer.print("weights sha256:", trainer.digest())


if __name__ == "__main__":
    main()
