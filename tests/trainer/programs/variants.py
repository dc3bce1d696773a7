"""Train small models in many ways and print a digest of each: one line `name sha` each.

`variants.py [--engine ENGINE] [NAME ...]`
"""

import sys
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import unisono
from unisono.state.digest import digest

N, FEATURES, CLASSES = 59, 12, 5
ENGINE = sys.argv[2] if sys.argv[1:2] == ["--engine"] else "auto"
Trainer = partial(unisono.Trainer, engine=ENGINE)


def data():
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(N, FEATURES, generator=generator), torch.randint(0, CLASSES, (N,), generator=generator)
    )


class Augmented(Dataset):
    """Adds noise from all three generators to each sample."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        import random

        import numpy as np

        x, y = data()[index]
        return x + torch.randn(FEATURES) + random.random() + np.float32(np.random.rand()), y


class Stream(IterableDataset):
    def __iter__(self):
        for x, y in zip(*data().tensors, strict=True):
            yield x * (1 + 0.1 * torch.randn(())), y


def mlp(**options):
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(FEATURES, 33),
        nn.BatchNorm1d(33),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(33, 17),
        nn.ReLU(),
        nn.Linear(17, CLASSES),
    )


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model, optimizer, *, loss=loss, dataset=None, epochs=1, batch_size=24, batches=None, **options):
    trainer = Trainer(model, optimizer, virtual_ranks=5, progress=False, **options)
    for _ in trainer.epochs(epochs):
        for batch in trainer.batches(dataset or data(), batch_size=batch_size, **(batches or {})):
            trainer.step(loss, batch)
    return trainer


def simple(**options):
    model = mlp()
    return train(model, adamw(model), **options).digest()


def scheduler():
    model = mlp()
    optimizer = adamw(model)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    return train(model, optimizer, epochs=2, scheduler=cycle).digest()


def sgd(**options):
    model = mlp()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, **options)).digest()


def weighted():
    def weighted(m, b):
        return unisono.Sum((F.cross_entropy(m(b[0]), b[1], reduction="none") * b[1]).sum(), b[1].sum())

    return simple(loss=weighted)


def ema():
    model = mlp()
    trainer = train(model, adamw(model), epochs=2, ema_decay=0.9)
    value = trainer.evaluate(lambda m, b: m(b[0]).sum(1), data(), ema=True)
    return digest({"average": dict(trainer._averages[""].module.state_dict()), "value": [value.total, value.count]})


def evaluated():
    """What a user's function draws in an evaluation belongs to the virtual rank, too."""
    model = mlp()
    trainer = train(model, adamw(model))
    value = trainer.evaluate(lambda m, b: torch.randn(len(b[0])), data(), micro_batch_size=2)
    return digest({"value": [value.total, value.count]})


class Routed(nn.Module):
    """Uses one of two branches, by the data: some virtual ranks give some parameters no gradient."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(FEATURES, CLASSES) for _ in range(3)])

    def forward(self, x):
        return self.branches[int(x[0, 0] > 0)](x)  # the third is never used


def routed():
    torch.manual_seed(1)
    model = Routed()
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)).digest()


def frozen():
    model = mlp()
    model[0].requires_grad_(False)
    trainer = Trainer(model, adamw(model), virtual_ranks=5, progress=False)
    for epoch in trainer.epochs(3):
        model[0].requires_grad_(epoch > 0)  # thawed after the first epoch
        for batch in trainer.batches(data(), batch_size=24):
            trainer.step(loss, batch)
    return trainer.digest()


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.middle, self.last = nn.Linear(FEATURES, 20), nn.Linear(20, 20), nn.Linear(20, CLASSES)
        self.reentrant = reentrant

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):  # the shared layer gets its gradient twice where checkpointing is re-entrant
            x = checkpoint(lambda y: self.middle(y).relu(), x, use_reentrant=self.reentrant)
        return self.last(x)


def checkpointed(*, reentrant):
    model = Checkpointed(reentrant)
    return train(model, adamw(model), overlap=not reentrant).digest()


def tied():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, FEATURES))
    model[2].weight = model[0].weight
    return train(model, adamw(model)).digest()


def bf16_parameters():
    model = mlp().bfloat16()
    cast = lambda m, b: F.cross_entropy(m(b[0].bfloat16()).float(), b[1], reduction="none")  # noqa: E731
    return train(model, adamw(model), loss=cast).digest()


def channels_last():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES))
    model = model.to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(7)
    images = TensorDataset(torch.randn(N, 3, 6, 6, generator=generator), data().tensors[1])
    return train(model, adamw(model), dataset=images, clip_grad_norm=0.5).digest()


def compiled():
    """All virtual ranks have as many samples: each other number of them would be a compilation."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 17), nn.BatchNorm1d(17), nn.ReLU(), nn.Linear(17, CLASSES))
    batches = {"drop_last": True}
    return train(torch.compile(model, backend="aot_eager"), adamw(model), batch_size=20, batches=batches).digest()


def gan():
    torch.manual_seed(1)
    models = {
        "generator": nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, FEATURES)),
        "discriminator": nn.Sequential(nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    }
    optimizers = {name: torch.optim.Adam(m.parameters(), lr=0.01) for name, m in models.items()}

    def judge(models, batch):
        fake = models["generator"](torch.randn(len(batch[0]), 4))
        d = models["discriminator"]
        return (F.softplus(-d(batch[0])) + F.softplus(d(fake.detach()))).squeeze(1)

    def forge(models, batch):
        return F.softplus(-models["discriminator"](models["generator"](torch.randn(len(batch[0]), 4)))).squeeze(1)

    trainer = Trainer(models, optimizers, virtual_ranks=5, progress=False)
    for _ in trainer.epochs(2):
        for batch in trainer.batches(data(), batch_size=24):
            trainer.step(judge, batch, optimizer="discriminator")
            trainer.step(forge, batch, optimizer="generator")
    return trainer.digest()


def big():
    """Parameters larger than a bucket, and many small ones."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(FEATURES, 1500), nn.ReLU(), nn.Linear(1500, 1500), nn.Linear(1500, 3))
    last = lambda m, b: F.cross_entropy(m(b[0]), b[1] % 3, reduction="none")  # noqa: E731
    return train(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=last, batch_size=30).digest()


VARIANTS = {
    "plain": simple,
    "unshuffled": partial(simple, batches={"shuffle": False}),
    "tiny batches": partial(simple, batch_size=6),  # most virtual ranks have one sample
    "accumulated": partial(simple, batches={"micro_batch_size": 2}),
    "clipped": partial(simple, clip_grad_norm=0.1),
    "no overlap": partial(simple, overlap=False),
    "weighted": weighted,
    "bf16": partial(simple, autocast="bf16"),
    "fp16": partial(simple, autocast="fp16"),
    "scheduler": scheduler,
    "sgd": sgd,
    "sgd fused": partial(sgd, fused=True),
    "ema": ema,
    "evaluated": evaluated,
    "routed": routed,
    "frozen": frozen,
    "checkpointed": partial(checkpointed, reentrant=False),
    "re-entrant": partial(checkpointed, reentrant=True),
    "tied": tied,
    "bf16 parameters": bf16_parameters,
    "channels last": channels_last,
    "compiled": compiled,
    "gan": gan,
    "big": big,
    "augmented": partial(simple, dataset=Augmented()),
    "augmented, 1 worker": partial(simple, dataset=Augmented(), batches={"workers": 1}),
    "augmented, 3 workers": partial(simple, dataset=Augmented(), batches={"workers": 3}),
    "stream": partial(simple, dataset=Stream()),
    "stream, worker": partial(simple, dataset=Stream(), batches={"workers": 2}),
}

if __name__ == "__main__":
    import os

    for name in sys.argv[3 if "--engine" in sys.argv else 1 :] or VARIANTS:
        sha = VARIANTS[name]()
        if os.environ.get("RANK", "0") == "0":
            print(f"{name} = {sha}", flush=True)
