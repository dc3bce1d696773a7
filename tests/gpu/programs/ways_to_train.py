"""Train in many ways on a GPU that ranks share, and print a digest of each: `ways_to_train.py BACKEND [NAME ...]`.

Over NCCL ranks share a GPU if they say that they are on separate hosts.
"""

import os
import sys
import tempfile
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono import comm, embedding
from unisono.parallel import Pipeline, Shard

BACKEND, *ASKED = sys.argv[1:]
if BACKEND == "nccl":
    os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = os.environ["RANK"], "lo"


class Net(nn.Module):
    """Blocks with dropout, of which a pipeline and shards make use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.2))
        self.second = nn.Sequential(nn.Linear(64, 300), nn.LayerNorm(300), nn.GELU(), nn.Dropout(0.2))
        self.third = nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(64, 2)

    def forward(self, x):
        return self.head(self.third(self.second(self.first(x))) + self.first(x))


class Tied(nn.Module):
    """Weights that stages share, in both directions."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 300), nn.Linear(300, 16), nn.Linear(16, 300)
        self.fourth, self.head = nn.Linear(300, 16), nn.Linear(16, 2)
        self.third.weight, self.second.weight = self.first.weight, self.fourth.weight

    def forward(self, x):
        hidden = self.second(F.gelu(self.first(x)))
        return self.head(self.fourth(F.gelu(self.third(hidden))))


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.two(F.relu(self.norm(self.one(x.view(-1, 1, 4, 4))))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(4, 32, 2, batch_first=True, dropout=0.1), nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.body(x.view(-1, 4, 4))[0][:, -1])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.1)
        self.embed, self.head = nn.Linear(4, 64), nn.Linear(64, 2)

    def forward(self, x):
        return self.head(self.body(self.embed(x.view(-1, 4, 4))).mean(1))


class Words(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table, self.head = table, nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.table(x.abs().mul(1000).long() % 500))


X = torch.randn(48, 16, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, (X.sum(1) > 0).long())


def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def train(build=Net, optimizer=adam, *, max_steps=None, **options):
    torch.manual_seed(0)
    model = build()
    trainer = unisono.Trainer(model, optimizer(model), virtual_ranks=6, progress=False, **options)
    for _ in trainer.epochs(2, max_steps=max_steps):
        for batch in trainer.batches(DATA, batch_size=18, micro_batch_size=2):
            trainer.step(loss, batch)
    assert [*model.parameters()][-1].device.type != "cpu"  # tables may stay on the CPU
    return trainer.digest()


def last_layout(build=Conv):
    return build().to(memory_format=torch.channels_last)


def compiled():
    model = Net()
    model.second.compile()
    return model


def several(model):
    return {
        "dense": torch.optim.AdamW(model.head.parameters(), lr=1e-2),
        "rows": torch.optim.SparseAdam([*model.table.parameters()], lr=1e-2),
    }


def sparse():
    torch.manual_seed(0)
    model = Words(nn.EmbeddingBag(500, 16, sparse=True, mode="sum"))
    trainer = unisono.Trainer(model, several(model), virtual_ranks=6, progress=False)
    for batch in trainer.batches(DATA, batch_size=18):
        for name in ("dense", "rows"):
            trainer.step(loss, batch, optimizer=name)
    return trainer.digest()


def tables(*, divided=False, rows=None, **options):
    size = rows or ({"rows": 500, "init_std": 1.0} if divided else {"rows": 500})
    table = embedding.Table(**size, dim=16, pooling="sum", optimizer=embedding.RowwiseAdagrad(lr=0.05))
    found = embedding.Tables({"item": table}, divided=divided)
    return train(lambda: Words(found["item"]), lambda model: adam(model.head), **options)


def resumed(**options):
    """Stop and go on: the digest is that of a run that was not stopped."""
    folder = comm.broadcast(tempfile.mkdtemp(), src=0)
    train(optimizer=partial(adam, **options), directory=folder, max_steps=2)
    return train(optimizer=partial(adam, **options), directory=folder)


def resumed_from_shards():
    folder = comm.broadcast(tempfile.mkdtemp(), src=0)
    train(directory=folder, max_steps=2, parallel=Shard())
    return train(directory=folder)


RANKS = unisono.init(BACKEND, timeout=90).world_size
PIPELINE = Pipeline(stages=["second"]) if RANKS < 3 else Pipeline(stages=["second", "third"])
TIED = Pipeline(stages=["third"] if RANKS < 3 else ["third", "head"])
INTERLEAVED = PIPELINE if RANKS == 3 else Pipeline(stages=["second", "third", "head"], schedule="interleaved")
SAME = "as whole models"
WAYS = {
    SAME: train,
    "one by one": partial(train, optimizer=partial(adam, foreach=False)),
    "overlap=False": partial(train, overlap=False),
    "shards": partial(train, parallel=Shard()),
    "shards by size": partial(train, parallel=Shard(by="size")),
    "zero=1": partial(train, parallel=Shard(zero=1)),
    "resumed": resumed,
    "resumed from shards": resumed_from_shards,
    "Conv": partial(train, Conv),
    "Recurrent": partial(train, Recurrent),
    "Attention": partial(train, Attention),
    "channels_last": partial(train, last_layout, partial(adam, fused=True)),
    "fused": partial(train, optimizer=partial(adam, fused=True), clip_grad_norm=0.1),
    "capturable": partial(train, optimizer=partial(adam, capturable=True), clip_grad_norm=0.1),
    "momentum": partial(
        train, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), ema_decay=0.9
    ),
    "bf16": partial(train, Attention, autocast="bf16", clip_grad_norm=1.0),
    "fp16": partial(train, Attention, autocast="fp16", clip_grad_norm=1.0),
    "clipped shards": partial(train, parallel=Shard(), clip_grad_norm=0.1, optimizer=partial(adam, fused=True)),
    "fp16 whole models": partial(train, autocast="fp16"),
    "fp16 shards": partial(train, autocast="fp16", parallel=Shard()),
    "resumed fused": partial(resumed, fused=True),
    "resumed capturable": partial(resumed, capturable=True),
    "compiled": partial(train, compiled),
    "DiLoCo": partial(train, sync=unisono.DiLoCo(every=2, outer_lr=0.7)),
    "sparse": sparse,
    "tables": tables,
    "divided tables": partial(tables, divided=True),
    "clipped tables": partial(tables, divided=True, clip_grad_norm=0.1),
    "fp16 tables": partial(tables, divided=True, autocast="fp16", clip_grad_norm=0.1),
    "dynamic tables": partial(tables, divided=True, rows={"capacity": 400, "when_full": "evict_oldest"}),
    "pipeline": partial(train, parallel=PIPELINE),
    "interleaved pipeline": partial(train, parallel=INTERLEAVED),
    "tied": partial(train, Tied),
    "tied pipeline": partial(train, Tied, parallel=TIED),
    "fp16 pipeline": partial(train, autocast="fp16", parallel=PIPELINE, clip_grad_norm=0.1),
}
for name, way in WAYS.items():
    if name in (ASKED or WAYS):
        print(f"{name} = {way()}", flush=True)
