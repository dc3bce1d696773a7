"""Truncated backpropagation through time and walks that go on: state of virtual ranks, in one run for each engine.

Arguments: the engine, a folder for checkpoints, and the number of steps after which to stop. With "fail" for that, the
function of rollouts fails in the middle of their epoch.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional as F

import unisono

STREAMS, CHUNK, CHUNKS = 8, 5, 6


class Streams(torch.utils.data.Dataset):
    """Position p is chunk p // STREAMS of stream p % STREAMS."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 7, (STREAMS, CHUNK * CHUNKS + 1), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return STREAMS * CHUNKS

    def __getitem__(self, position: int) -> torch.Tensor:
        chunk, stream = divmod(position, STREAMS)
        return self.tokens[stream, chunk * CHUNK : (chunk + 1) * CHUNK + 1]


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cells, self.out = nn.Embedding(7, 6), nn.LSTM(6, 9, batch_first=True), nn.Linear(9, 7)

    def forward(self, tokens, state):
        read, state = self.cells(self.words(tokens), state)
        return self.out(read), state


def zeros():
    return torch.zeros(1, STREAMS // 4, 9, dtype=torch.float64), torch.zeros(1, STREAMS // 4, 9, dtype=torch.float64)


hidden = unisono.Carried(zeros, reset_each_epoch=True)
walker = unisono.Carried(lambda: {"at": torch.randn(3, dtype=torch.float64), "steps": 0})
fails = sys.argv[3:] == ["fail"]


def read(model, batch):
    scores, hidden.value = model(batch[:, :-1], hidden.value)
    return F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), reduction="none").view(len(batch), -1).mean(1)


def walk(model):
    state = walker.value
    if fails and state["steps"] == 2:
        raise KeyError("no such field")
    walker.value = {"at": state["at"] + torch.randn(3, dtype=torch.float64), "steps": state["steps"] + 1}
    return torch.cat([state["at"], torch.tensor([state["steps"]])])[None].repeat(2, 1)


def walk_loss(model, batch):
    state = walker.value
    walker.value = {**state, "at": state["at"] * 0.5}
    return (model.out.weight[0, :4] * batch).sum(1) ** 2


def make(engine, directory=None):
    torch.manual_seed(0)
    model = Reader().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    stateful = {"hidden": hidden, "walker": walker}
    return unisono.Trainer(
        model, optimizer, virtual_ranks=4, engine=engine, directory=directory, stateful=stateful, progress=False
    )


def main() -> None:
    engine, folder = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    trainer = make(engine, folder)
    last = int(sys.argv[3]) if len(sys.argv) > 3 and not fails else None
    for epoch in trainer.epochs(4, max_steps=last):
        if epoch == 2:
            for batch in trainer.rollouts(walk, steps=3):
                trainer.step(walk_loss, batch)
            continue
        for batch in trainer.batches(Streams(), batch_size=STREAMS, shuffle=False):
            trainer.step(read, batch)
        trainer.print("loss on the same streams:", trainer.evaluate(read, Streams(), batch_size=STREAMS).total)
    trainer.print("weights sha256:", trainer.digest())


if __name__ == "__main__":
    main()
