"""Train tables with sparse gradients in many ways and print a digest of each: `sparse.py DIRECTORY ENGINES [NAME ...]`.

DIRECTORY/begun gets checkpoints of a run that one rank begins. More ranks go on with a copy of it, DIRECTORY/ENGINE.
"""

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import LossError, NonFiniteLossError

ROWS, WIDTH = 300, 6


class Net(nn.Module):
    """Tables: one of many rows, bags of which some are empty, and one that some virtual ranks use, or none."""

    def __init__(self, *, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(40, WIDTH, sparse=True, mode="sum", padding_idx=0)
        self.rare = nn.Embedding(9, WIDTH, sparse=True)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x):
        y = self.words(x[:, :3]).float().mean(1) + self.bags((x[:, 3:] % 40) * (x[:, 3:] % 3 == 0))
        if x[0, 0] % 8 == 0:
            y = y + self.rare(x[:, 0] % 9)
        return self.last(y)

    def tables(self):
        return [self.words.weight, self.bags.weight, self.rare.weight]


def data():
    generator = torch.Generator().manual_seed(1)
    # Few words are frequent, and so are in the shares of several virtual ranks. The last batch has 3 samples.
    words = (ROWS * torch.rand(83, 5, generator=generator) ** 3).long()
    return TensorDataset(words, torch.randint(0, 3, (83,), generator=generator))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def weighted(model, batch):
    weights = 1.0 + batch[1]
    return unisono.Sum((weights * loss(model, batch)).sum(), weights.sum())


def both(model):
    """The usual way: the tables have an optimizer of their own."""
    return {"tables": optim.SparseAdam(model.tables(), lr=0.1), "rest": optim.AdamW(model.last.parameters(), lr=0.01)}


def train(make, *, steps=6, loss=loss, dtype=torch.float32, virtual_ranks=5, **options):
    model = Net(dtype=dtype)
    made = make(model)
    trainer = unisono.Trainer(model, made, virtual_ranks=virtual_ranks, engine=ENGINE, progress=False, **options)
    for _ in trainer.epochs(9, max_steps=steps):
        for batch in trainer.batches(data(), batch_size=20, micro_batch_size=3):
            for name in made if isinstance(made, dict) else [None]:
                trainer.step(loss, batch, optimizer=name)
    return trainer.digest()


def resumed():
    """One rank begins the run, any number of them goes on with it."""
    begun, directory = Path(sys.argv[1]) / "begun", Path(sys.argv[1]) / ENGINE
    if ENGINE == "auto":
        train(both, directory=begun, steps=3)
        shutil.copytree(begun, directory)
    return train(both, directory=directory, resume="must")


def frozen():
    """A table is left out for an epoch."""
    model = Net()
    optimizer = optim.SparseAdam(model.tables(), lr=0.1)
    model.last.requires_grad_(False)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=5, engine=ENGINE, progress=False)
    for epoch in trainer.epochs(3):
        model.words.requires_grad_(epoch != 1)
        for batch in trainer.batches(data(), batch_size=40):
            trainer.step(loss, batch)
    assert optimizer.state[model.words.weight]["step"] == 6
    return trainer.digest()


def aborted():
    """A loss that is NaN on one virtual rank, or an exception on all, changes nothing; then training goes on."""
    model = Net()
    optimizer = optim.SparseAdam(model.tables(), lr=0.1)
    model.last.requires_grad_(False)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=ENGINE, progress=False)
    for batch in trainer.batches(data(), batch_size=20, drop_last=True):  # all ranks have a share
        before = trainer.digest()
        for bad in (
            lambda model, b: loss(model, b) * torch.where(b[1] > 0, torch.nan, 1.0),
            lambda model, b: loss(model, b).detach(),
        ):
            try:
                trainer.step(bad, batch)
            except LossError as error:
                assert isinstance(error, NonFiniteLossError) == ("nan" in str(error))
            else:
                raise AssertionError("no exception")
            assert trainer.digest() == before and all(p.grad is None for p in model.parameters())
        trainer.step(loss, batch)
    return trainer.digest()


def shown():
    """All ranks find the gradient of the global batch in p.grad: sparse, summed, and clipped."""
    model = Net()
    trainer = unisono.Trainer(
        model,
        optim.SGD(model.parameters(), lr=0.5),
        virtual_ranks=5,
        engine=ENGINE,
        clip_grad_norm=0.01,
        progress=False,
    )
    without = 0
    for batch in trainer.batches(data(), batch_size=20):
        trainer.step(loss, batch)
        given = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(g.is_sparse and g.is_coalesced() for p in model.tables() if (g := p.grad) is not None)
        norm = torch.stack([(g.values() if g.is_sparse else g).norm() for g in given]).norm()
        assert abs(norm - 0.01) < 1e-5
        assert model.words.weight.grad._nnz() <= 60
        without += model.rare.weight.grad is None
    assert 0 < without < 5
    parts = [part for g in given if g.is_sparse for part in (g.indices()[0].double(), g.values().flatten().double())]
    sums = trainer._run.world.gather(float(torch.cat(parts).sum()))
    assert len(set(sums)) == 1
    return trainer.digest()


def large():
    """A table costs no memory beside itself: no gradient of its size is made."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(200_000, 32, sparse=True), nn.Linear(32, 3))
    nbytes = model[0].weight.nbytes
    optimizers = {"table": optim.SGD(model[0].parameters(), lr=0.1), "rest": optim.AdamW(model[1].parameters())}
    trainer = unisono.Trainer(model, optimizers, virtual_ranks=4, engine=ENGINE, progress=False)
    # Few rows and close together: pages of shared memory count once a rank has looked at them.
    rows = TensorDataset(torch.arange(320).view(80, 4), torch.arange(80) % 3)
    start = None
    for batch in trainer.batches(rows, batch_size=20):
        trainer.step(loss, batch, optimizer="table")
        trainer.step(loss, batch, optimizer="rest")
        if start is None:  # the weights have moved by now
            Path("/proc/self/clear_refs").write_text("5")
            start = highest_kib()
    assert highest_kib() - start < nbytes / 1024 / 8, (start, highest_kib())
    return trainer.digest()


def highest_kib():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


VARIANTS = {
    "SparseAdam and AdamW": partial(train, both),
    "SGD": partial(train, lambda m: optim.SGD(m.parameters(), lr=0.5)),
    "SGD, weighted, 4 virtual ranks": partial(
        train, lambda m: optim.SGD(m.parameters(), lr=0.5), loss=weighted, virtual_ranks=4
    ),
    "SGD, bfloat16": partial(train, lambda m: optim.SGD(m.parameters(), lr=0.5), dtype=torch.bfloat16),
    "Adagrad": partial(train, lambda m: optim.Adagrad(m.parameters(), lr=0.1)),
    "clipped": partial(train, both, clip_grad_norm=0.05),
    "clipped, 4 virtual ranks": partial(
        train, lambda m: optim.Adagrad(m.parameters(), lr=0.1), clip_grad_norm=0.05, virtual_ranks=4
    ),
    "fp16, clipped": partial(train, both, autocast="fp16", clip_grad_norm=0.05),
    "resumed": resumed,
    "frozen": frozen,
    "aborted": aborted,
    "shown": shown,
    "large": large,
}

if __name__ == "__main__":
    for ENGINE in sys.argv[2].split(","):
        for name in sys.argv[3:] or VARIANTS:
            sha = VARIANTS[name]()
            if os.environ.get("RANK", "0") == "0":
                print(f"{ENGINE}: {name} = {sha}", flush=True)
