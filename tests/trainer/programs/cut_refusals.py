"""What a pipeline refuses, one after the other: prints the name of each case with the error that it raised."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

Pipeline = unisono.parallel.Pipeline


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        self.hidden = self.linear(x)
        return torch.relu(self.hidden) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Stream(torch.utils.data.IterableDataset):
    def shard(self, num_shards, index):
        return self

    def __iter__(self):
        return iter(DATA)


class Deciding(Net):
    def forward(self, x):
        x = self.layers[0](x)
        return self.head(self.layers[2](x) if x.max() > 0 else x)


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def with_hidden(model, batch):
    return loss(model, batch) + model.layers[0].hidden.square().mean()


torch.manual_seed(0)
X = torch.randn(32, 16)
DATA = TensorDataset(X, (X.sum(1) > 0).long())
two = ["layers.2"]


def make(model=None, *, optimizer=None, **arguments):
    model = Net() if model is None else model
    optimizer = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, virtual_ranks=8, progress=False, **arguments)


def step(*model, function=loss, stages=two, options=None, **arguments):
    trainer = make(*model, parallel=Pipeline(stages=stages), **arguments)
    batch = next(trainer.batches(DATA, batch_size=16))
    trainer.step(function, batch, **(options or {}))
    return trainer


def called():
    model = Net()
    step(model)
    return model(X)


def two_models():
    models = {"a": Net(), "b": Net()}
    optimizer = torch.optim.SGD([p for each in models.values() for p in each.parameters()], lr=0.1)
    unisono.Trainer(models, optimizer, virtual_ranks=8, progress=False, parallel=Pipeline(stages=two))


def viewed():
    model = Net()
    model.head.weight.data = torch.zeros(2, 32)[:, ::2]
    return model


CASES = {
    "unknown name": lambda: step(stages=["layer.2"]),
    "container": lambda: step(stages=["layers"]),
    "too many stages": lambda: step(stages=["layers.1", "layers.2"]),
    "1f1b": lambda: make(parallel=Pipeline(stages=["layers.1", "layers.2", "head"], schedule="1f1b")),
    "more than blocks": lambda: step(stages=["layers.1", "layers.1"]),
    "more stages than places": lambda: step(stages=12),
    "too little memory": lambda: make(parallel=Pipeline(stages=2, memory_gib=1e-6)).evaluate(loss, DATA, batch_size=16),
    "no stages": lambda: step(stages=[]),
    "a name alone": lambda: step(stages="layers.2"),
    "no pipeline": lambda: make(parallel="layers.2"),
    "no schedule": lambda: Pipeline(stages=two, schedule="1b1f"),
    "replicas": lambda: make(parallel=Pipeline(stages=two, replicas=3)),
    "zero": lambda: Pipeline(stages=two, zero=2),
    "zero and its schedule": lambda: Pipeline(stages=two, zero=3, schedule="1f1b"),
    "zero of Adafactor": lambda: make(parallel=Pipeline(stages=two, zero=1), optimizer=torch.optim.Adafactor),
    "zero of a view": lambda: make(viewed(), parallel=Pipeline(stages=two, zero=1)),
    "zero in a loop": lambda: unisono.parallel.cut(Net(), Pipeline(stages=two, zero=1)),
    "interleaved": lambda: make(parallel=Pipeline(stages=["layers.1", "layers.2"], schedule="interleaved")),
    "shared": lambda: make(parallel=Pipeline(stages=two), engine="shared"),
    "carried": lambda: make(parallel=Pipeline(stages=two), stateful={"h": unisono.Carried(lambda _: 0)}),
    "compiled": lambda: make(torch.compile(Net()), parallel=Pipeline(stages=two)),
    "several models": two_models,
    "reads numbers": lambda: step(Deciding()),
    "an attribute": lambda: step(function=with_hidden),
    "encode": lambda: step(function=lambda m, e: e.sum(), options={"encode": lambda m, b: m(b[0])}),
    "on_gradients": lambda: step(options={"on_gradients": lambda model: None}),
    "LBFGS": lambda: step(optimizer=torch.optim.LBFGS),
    "digest": lambda: step().digest(),
    "a call in mid-run": called,
    "collect": lambda: make(parallel=Pipeline(stages=two)).collect(lambda model: 0),
    "sharded": lambda: make(parallel=Pipeline(stages=two)).batches(Stream(), batch_size=16, sharded=True),
}
for name, case in CASES.items():
    try:
        case()
        print(f"{name}: not refused")
    except (TypeError, ValueError, unisono.errors.UnisonoError) as error:
        print(f"{name}: {type(error).__name__}: {error}".replace("\n", " "))
