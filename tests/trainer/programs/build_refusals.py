"""What `unisono.parallel.build` and models built by it refuse; prints a line for each."""

import copy

import torch
from torch import nn

import unisono
from unisono.parallel import Shard, build


def small():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def trainer(model, **options):
    return unisono.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), virtual_ranks=4, progress=False, **options
    )


def by_rank():
    model = small()
    nn.init.normal_(model[int(unisono.init().rank > 0)].weight)
    return model


def reads_by_rank():
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(1500, 1500) for _ in range(4))
    model[unisono.init().rank].weight.data.sum()
    return model


def sharing():
    model = small()
    model[1].weight.data = model[0].weight.data[:]
    return model


def uninitialised():
    torch.manual_seed(0)
    model = small()
    model[2].weight.data = torch.empty(8, 8).copy_(torch.full((8, 8), float(unisono.init().rank)))
    return model


def changed():
    model = build(small, parallel=Shard())
    model.append(nn.Linear(8, 8))
    trainer(model, parallel=Shard())


def written():
    model = build(small, parallel=Shard())
    nn.init.zeros_(model[1].weight)
    trainer(model, parallel=Shard())


def trained(call):
    made = trainer(model := build(small, parallel=Shard()), parallel=Shard())
    for _ in made.fit(lambda model, batch: model(batch[0]).square().mean(1), DATA, epochs=1, batch_size=8):
        pass
    return call(made, model)


DATA = torch.utils.data.TensorDataset(torch.ones(16, 8))
CASES = {
    "a module": lambda: build(small(), parallel=Shard()),
    "no settings": lambda: build(small, parallel="block"),
    "no model": lambda: build(lambda: 3, parallel=Shard()),
    "a failure": lambda: build(lambda: 1 / 0, parallel=Shard()),
    "unknown name": lambda: build(small, parallel=Shard(by=["9"])),
    "too many replicas": lambda: build(small, parallel=Shard(replicas=3)),
    "sharing": lambda: build(sharing, parallel=Shard()),
    "by rank": lambda: build(by_rank, parallel=Shard()),
    "uninitialised": lambda: build(uninitialised, parallel=Shard()),
    "within": lambda: build(lambda: nn.Sequential(build(small, parallel=Shard())), parallel=Shard()),
    "a call": lambda: build(small, parallel=Shard())(torch.ones(2, 8)),
    "a copy": lambda: copy.deepcopy(build(small, parallel=Shard())),
    "a write": written,
    "without parallel": lambda: trainer(build(small, parallel=Shard())),
    "other settings": lambda: trainer(build(small, parallel=Shard()), parallel=Shard(by=["1"])),
    "changed": changed,
    "digest at the end": lambda: trained(lambda trainer, model: trainer.digest()),
    "a call at the end": lambda: trained(lambda trainer, model: model(torch.ones(2, 8))),
    "reads by rank": lambda: build(reads_by_rank, parallel=Shard()),
}
for name, call in CASES.items():
    try:
        call()
    except (TypeError, ValueError, RuntimeError, ArithmeticError, unisono.errors.UnisonoError) as error:
        print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    else:
        print(f"{name}: not refused")
