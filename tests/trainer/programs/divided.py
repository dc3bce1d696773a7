"""Trains models that are divided over ranks; prints a digest of all results for each.

Arguments: how models are divided (a key of HOW), then optionally names of cases.
"""

import contextlib
import hashlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "parallel"))
import pipeline_models

import unisono

by, *chosen = sys.argv[1:]


class Wide(nn.Module):
    """Layers that are cut within a parameter, one parameter that is turned, and some that are small or unused."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 1237), nn.Linear(1237, 3)
        self.turned = nn.Parameter((torch.randn(157, 1237) / 30).t())
        self.unused, self.seldom, self.number = (nn.Parameter(torch.zeros(n)) for n in ((7,), (3,), ()))

    def forward(self, x):
        y = self.last(torch.tanh(torch.tanh(self.first(x)) @ self.turned) @ self.turned.t()) + self.number
        return y + self.seldom if x[0, 0] > 0.5 else y


class Checkpointed(nn.Module):
    """Blocks that compute again in the backward pass, around a block and within it; the first one is called twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(4))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        x = self.blocks[0](x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) + x
        return self.head(x)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.dropout = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.2)

    def forward(self, x):
        return checkpoint(self.compute, torch.tanh(self.one(x)), use_reentrant=False)

    def compute(self, x):
        return self.dropout(self.two(x))


class Wandering(nn.Module):
    """Which blocks it calls, in which order and how often depends on the samples: so on the rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        order = x[0].argsort()[: 1 + int(x[0, 0].abs() * 3)]
        for number in order.tolist():
            x = torch.tanh(self.blocks[number % 4](x))
        return x[:, :3]


def vectors(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


def classes(model, batch):
    out = model(batch[0]).flatten(1)[:, :3]
    loss = F.cross_entropy(out, batch[1], reduction="none")
    return {"loss": loss, "accuracy": (out.argmax(1) == batch[1]).float()}


def images(model, batch):
    return (model(batch[0]) - batch[0]).square().mean((1, 2, 3))


def tokens(model, batch):
    loss = F.cross_entropy(model(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten(), reduction="none")
    return unisono.Sum(loss.sum(), loss.numel())


def two_optimizers(model):
    split = len(parameters := [*model.parameters()]) // 2
    return {
        "early": torch.optim.SGD(parameters[:split], lr=0.05, momentum=0.9),
        "late": torch.optim.AdamW(parameters[split:], lr=1e-2),
    }


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def fused_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def partly_frozen(model):
    for p in [*model.parameters()][2:6]:
        p.requires_grad_(False)
    return torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=0.05)


torch.manual_seed(1)
X = torch.randn(14, 16)
VECTORS = TensorDataset(X, X.flip(1))
CLASSES = TensorDataset(torch.randn(14, 4, 6, 6), torch.randint(0, 3, (14,)))
IMAGES = TensorDataset(torch.randn(14, 2, 10, 10))
TOKENS = TensorDataset(torch.randint(0, 30, (14, 8)))
FLAT = TensorDataset(X, torch.randint(0, 3, (14,)))
CASES = {
    "mlp": (pipeline_models.mlp, vectors, VECTORS, ["5", "9", "16"], adam, {"clip_grad_norm": 0.5}, 1),
    "fp16": (
        pipeline_models.mlp, vectors, VECTORS, ["1"], fused,
        {"autocast": "fp16", "clip_grad_norm": 0.5, "ema_decay": 0.8}, None,
    ),
    "residual": (
        pipeline_models.Residual, classes, CLASSES, ["blocks.1", "blocks.3", "head"], two_optimizers,
        {"ema_decay": 0.8}, None,
    ),
    "bf16": (pipeline_models.Residual, classes, CLASSES, ["blocks.1", "head"], adam, {"autocast": "bf16"}, 1),
    "u_net": (pipeline_models.UNet, images, IMAGES, ["down.1", "middle", "wider.1"], fused_sgd, {}, None),
    "language_model": (
        pipeline_models.LanguageModel, tokens, TOKENS, ["layers.1", "norm"], adam, {"clip_grad_norm": 1}, 1,
    ),
    "frozen": (pipeline_models.mlp, vectors, VECTORS, ["1", "4", "9"], partly_frozen, {"overlap": False}, None),
    "checkpointed": (Checkpointed, classes, FLAT, ["blocks.0", "blocks.2"], adam, {}, 1),
    "wandering": (Wandering, classes, FLAT, ["blocks.0", "blocks.1", "blocks.3"], adam, {"virtual_ranks": 4}, 1),
    "wide": (Wide, classes, FLAT, ["first", "last"], fused, {"clip_grad_norm": 0.1, "virtual_ranks": 4}, None),
}  # fmt: skip


HOW = {
    "whole": lambda names: None,
    "block": lambda names: unisono.parallel.Shard(unit_bytes=1),
    "joined": lambda names: unisono.parallel.Shard(unit_bytes=2500),
    "default": lambda names: unisono.parallel.Shard(),
    "named": lambda names: unisono.parallel.Shard(by=names),
    "size": lambda names: unisono.parallel.Shard(by="size", unit_bytes=1500),
    "default_size": lambda names: unisono.parallel.Shard(by="size"),
    "zero1": lambda names: unisono.parallel.Shard(zero=1),
    "offload": lambda names: unisono.parallel.Shard(offload=True, unit_bytes=1),
    "offload_size": lambda names: unisono.parallel.Shard(offload=True, by="size", unit_bytes=3000, replicas=2),
    "offload_zero1": lambda names: unisono.parallel.Shard(offload=True, zero=1),
    "sums": lambda names: unisono.parallel.Shard(unit_bytes=1, sums="divided"),
    "sums_size": lambda names: unisono.parallel.Shard(by="size", unit_bytes=3000, replicas=2, sums="divided"),
    "sums_zero1": lambda names: unisono.parallel.Shard(zero=1, sums="divided"),
    "sums_offload": lambda names: unisono.parallel.Shard(offload=True, unit_bytes=2500, sums="divided"),
    "replicas": lambda names: unisono.parallel.Shard(by=names, replicas=2),
    "size_replicas": lambda names: unisono.parallel.Shard(by="size", unit_bytes=3000, replicas=2),
}


def train(name):
    make, loss, data, names, make_optimizer, options, micro_batch_size = CASES[name]
    torch.manual_seed(0)
    model = make()
    optimizer = make_optimizer(model)
    parallel = HOW[by](names)
    options = {"virtual_ranks": 5, **options}
    trainer = unisono.Trainer(model, optimizer, parallel=parallel, progress=False, seed=3, **options)
    several = isinstance(optimizer, dict)
    found = []
    for epoch in trainer.epochs(2):
        for batch in trainer.batches(data, batch_size=8, micro_batch_size=micro_batch_size):
            called = [None, "late"] if several and batch.step == 1 else ["early" if several and epoch else None]
            for each in called:
                result = trainer.step(loss, batch, optimizer=each)
                found.append((float(result), result.grad_norm, {k: float(v) for k, v in result.values.items()}))
        if not epoch or "ema_decay" in options:
            found.append(trainer.evaluate(loss, data, batch_size=9, ema=epoch > 0))
        if not epoch:
            outputs = trainer.predict(lambda model, batch: model(batch[0]), data, batch_size=9, to="all")
            found.append(hashlib.sha256(outputs.cpu().contiguous().numpy().tobytes()).hexdigest())
    found.append(trainer.digest())
    found += [
        (n, hashlib.sha256(p.detach().cpu().contiguous().numpy().tobytes()).hexdigest())
        for n, p in model.named_buffers()
    ]
    print(f"{name}: {hashlib.sha256(repr(found).encode()).hexdigest()}")


with contextlib.suppress(ImportError):
    import numpy  # noqa: F401  seeds are set for it, too
for name in chosen or CASES:
    train(name)
