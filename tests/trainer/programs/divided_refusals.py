"""What a division over ranks refuses, one after the other: prints the name of each case with the error it raised."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

Shard, Pipeline = unisono.parallel.Shard, unisono.parallel.Pipeline


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return torch.relu(self.linear(x)) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(16, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Opaque(Net):
    class Result:
        pass

    class Odd(Block):
        def forward(self, x):
            result = Opaque.Result()
            result.x = super().forward(x)
            return result

    def __init__(self):
        super().__init__()
        self.layers[3] = Opaque.Odd()

    def forward(self, x):
        return self.head(self.layers[3](x).x)


class Elsewhere(Net):
    def forward(self, x):
        return super().forward(F.linear(x, self.layers[1].linear.weight))


class Writing(Net):
    class Odd(Block):
        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.layers[2] = Writing.Odd()


class Multiplying(Net):
    def forward(self, x):
        return super().forward((x * self.layers[1].linear.weight.sum()).exp() * self.layers[1].linear.bias)


class OwnSGD(torch.optim.SGD):
    pass


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


torch.manual_seed(0)
X = torch.randn(32, 16)
DATA = TensorDataset(X, (X.sum(1) > 0).long())


def make(model=None, *, optimizer=None, by="block", **arguments):
    model = Net() if model is None else model
    optimizer = (optimizer or torch.optim.SGD)(model.parameters(), lr=0.1)
    shard = Shard(by=by, unit_bytes=1 if by == "block" else None) if by else None
    arguments = {"parallel": shard, **arguments}
    return unisono.Trainer(model, optimizer, virtual_ranks=8, progress=False, **arguments)


def step(*model, function=loss, options=None, **arguments):
    trainer = make(*model, **arguments)
    batch = next(trainer.batches(DATA, batch_size=16))
    trainer.step(function, batch, **(options or {}))
    return trainer


def two_models():
    models = {"a": Net(), "b": Net()}
    optimizer = torch.optim.SGD([p for each in models.values() for p in each.parameters()], lr=0.1)
    unisono.Trainer(models, optimizer, virtual_ranks=8, progress=False, parallel=Shard())


def sparse():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    trainer = make(model)
    data = TensorDataset(torch.arange(32) % 10, torch.arange(32) % 2)
    trainer.step(loss, next(trainer.batches(data, batch_size=16)))


def shared_memory():
    model = Net()
    model.layers[1].linear.weight = nn.Parameter(model.layers[0].linear.weight.data)
    return make(model)


def new_parameter():
    trainer = step()
    trainer.model.late = nn.Parameter(torch.zeros(3))
    trainer.optimizer.add_param_group({"params": [trainer.model.late]})
    trainer.step(loss, next(trainer.batches(DATA, batch_size=16)))


def zeroing():
    trainer = step()
    nn.init.zeros_(trainer.model.layers[1].linear.bias)
    trainer.step(loss, next(trainer.batches(DATA, batch_size=16)))


def compiled_block():
    model = Net()
    model.layers[1].compile()
    make(model, by="size")


CASES = {
    "unknown name": lambda: make(by=["layer.2"]),
    "never called": lambda: make(by=["layers"]),
    "nested": lambda: make(by=["layers.0", "layers.0.linear"]),
    "twice": lambda: make(by=["layers.1", "layers.1"]),
    "no names": lambda: Shard(by=[]),
    "a name alone": lambda: make(by="layers.2"),
    "no name": lambda: make(by=[2]),
    "a size of names": lambda: Shard(by=["layers.0"], unit_bytes=64),
    "a size with zero=1": lambda: Shard(zero=1, unit_bytes=64),
    "no size": lambda: Shard(by="size", unit_bytes=0),
    "zero": lambda: Shard(zero=2),
    "sums": lambda: Shard(sums="parts"),
    "zero=1 by size": lambda: Shard(zero=1, by="size"),
    "zero=1 and replicas": lambda: Shard(zero=1, replicas=2),
    "no replica": lambda: Shard(replicas=0),
    "too many replicas": lambda: make(parallel=Shard(replicas=3)),
    "compiled blocks": compiled_block,
    "with a pipeline": lambda: make(parallel=[Shard(), Pipeline(stages=["layers.2"])]),
    "no division": lambda: make(parallel="layers.2"),
    "shared": lambda: make(engine="shared"),
    "compiled": lambda: make(torch.compile(Net())),
    "several models": two_models,
    "carried": lambda: make(stateful={"h": unisono.Carried(lambda _: 0)}),
    "LBFGS": lambda: make(optimizer=torch.optim.LBFGS),
    "Adafactor": lambda: make(optimizer=torch.optim.Adafactor),
    "own optimizer": lambda: make(optimizer=OwnSGD),
    "sparse": sparse,
    "shared memory": shared_memory,
    "encode": lambda: step(function=lambda m, e: e.sum(), options={"encode": lambda m, b: m(b[0])}),
    "on_gradients": lambda: step(options={"on_gradients": lambda model: None}),
    "closure": lambda: step(options={"closure": True}),
    "collect": lambda: make().collect(lambda model: 0),
    "opaque": lambda: step(Opaque(), by=["layers.3"]),
    "elsewhere": lambda: step(Elsewhere()),
    "multiplying": lambda: step(Multiplying()),
    "writing": lambda: step(Writing()),
    "digest": lambda: step().digest(),
    "a call": lambda: step().model(X),
    "new parameter": new_parameter,
    "zeroing": zeroing,
}
for name, case in CASES.items():
    try:
        case()
        print(f"{name}: not refused")
    except (TypeError, ValueError, unisono.errors.UnisonoError) as error:
        print(f"{name}: {type(error).__name__}: {error}".replace("\n", " "))
