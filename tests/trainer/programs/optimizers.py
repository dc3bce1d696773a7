"""Train with every kind of optimizer and print a digest of each: `optimizers.py ENGINE [NAME ...]`."""

import os
import sys
from functools import partial

import torch
from lamb import Lamb
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono

ENGINE = sys.argv[1]
FEATURES, CLASSES = 70, 5


def data():
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(torch.randn(75, FEATURES, generator=generator), torch.arange(75) % CLASSES)


class Net(nn.Module):
    """Layers that ranks cut in the middle, small ones, a scalar, one never used, and one used by some samples only."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.wide, self.narrow = nn.Linear(FEATURES, 700), nn.Linear(700, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.never, self.sometimes = nn.Linear(3, 3), nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        y = self.narrow(self.wide(x).relu()) * self.scale
        return y + self.sometimes(x) if x[0, 0] > 0.3 else y


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(optimizer, model=None, *, steps=3, schedule=None, **options):
    model = model or Net()
    optimizer = optimizer(model.parameters())
    scheduler = schedule and schedule(optimizer)
    trainer = unisono.Trainer(
        model, optimizer, scheduler=scheduler, virtual_ranks=4, engine=ENGINE, progress=False, **options
    )
    for _ in trainer.epochs(9, max_steps=steps):
        for batch in trainer.batches(data(), batch_size=20):
            trainer.step(loss, batch)
    return trainer.digest()


class MySGD(optim.SGD):
    """A subclass may do anything; this one clips each parameter by its own norm."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(p.grad.norm().clamp(min=1.0))
        return super().step(closure)


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(FEATURES, 90, bias=False), nn.Linear(90, CLASSES, bias=False)

    def forward(self, x):
        return self.last(self.first(x).relu())


def grouped(params, **options):
    params = list(params)
    groups = [{"params": params[::2], "lr": 0.02, "betas": (0.8, 0.9)}, {"params": params[1::2], "weight_decay": 0.3}]
    return optim.AdamW(groups, lr=0.003, **options)


def bfloat16(kind=optim.AdamW, **options):
    class Half(Net):
        def forward(self, x):
            return super().forward(x.bfloat16()).float()

    return train(partial(kind, lr=0.01, **options), Half().bfloat16())


def on_unlike_threads(run):
    """Let torch use two threads on a single rank, and one on each of several."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if os.environ.get("WORLD_SIZE", "1") == "1" else 1)
    try:
        return run()
    finally:
        torch.set_num_threads(before)


def two_types(**options):
    """One parameter group has parameters of two types."""

    class Mixed(Net):
        def forward(self, x):
            return self.narrow(self.wide(x.bfloat16()).relu().float()) * self.scale

    model = Mixed()
    model.wide.bfloat16()
    return train(partial(optim.AdamW, lr=0.01, **options), model)


def one_fused_group(params):
    params = list(params)
    return optim.AdamW([{"params": params[:3], "fused": True}, {"params": params[3:]}], lr=0.003)


def added():
    """A parameter group is added in mid-run."""
    model = Net()
    optimizer = optim.AdamW(model.wide.parameters(), lr=0.01)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=ENGINE, progress=False)
    for _ in trainer.epochs(9, max_steps=4):
        for batch in trainer.batches(data(), batch_size=20):
            if trainer.steps_done == 2:
                optimizer.add_param_group({"params": [*model.narrow.parameters(), model.scale], "lr": 0.1})
            trainer.step(loss, batch)
    return trainer.digest()


def loaded(make):
    """Weights and optimizer state are loaded between steps, and hooks see each step once."""
    model = Net()
    optimizer = make(model.parameters(), lr=0.01)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=ENGINE, progress=False)
    norms, kept = [], None
    optimizer.register_step_pre_hook(lambda *_: norms.append(float(model.wide.weight.grad.norm())))
    optimizer.register_step_post_hook(lambda *_: norms.append(float(model.wide.weight.detach().norm())))
    for _ in trainer.epochs(9, max_steps=5):
        for batch in trainer.batches(data(), batch_size=20):
            trainer.step(loss, batch)
            if trainer.steps_done == 2:
                clone = {key: value.clone() for key, value in model.state_dict().items()}
                state = optimizer.state_dict()
                state["state"] = {i: {k: v.clone() for k, v in s.items()} for i, s in state["state"].items()}
                kept = clone, state
            if trainer.steps_done == 3:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
    assert len(norms) == 10
    return f"{trainer.digest()[:32]}{abs(hash(tuple(norms))):032x}"[:64]


def forgotten():
    """The optimizer loses its state in mid-run, of one parameter or of all, also right after a step that made some."""
    model = Net()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, fused=True)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=ENGINE, progress=False)
    for _ in trainer.epochs(9, max_steps=6):
        for batch in trainer.batches(data(), batch_size=20):
            trainer.step(loss, batch)
            if trainer.steps_done == 3:
                del optimizer.state[model.wide.weight]
            if trainer.steps_done in (1, 4):
                optimizer.state.clear()
    return trainer.digest()


def switched():
    """Momentum is put on and off between steps, and so are decay and a rate in a tensor."""
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    (group,) = optimizer.param_groups
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=4, engine=ENGINE, progress=False)
    changes = [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"momentum": 0}, {"weight_decay": 0}, {"momentum": 0.5}]
    for _ in trainer.epochs(9, max_steps=8):
        for batch in trainer.batches(data(), batch_size=20):
            group.update([*changes, {"momentum": 0.0, "lr": torch.tensor(0.02)}, {"lr": 0.03}][trainer.steps_done])
            trainer.step(loss, batch)
    return trainer.digest()


VARIANTS = {
    **{
        f"{kind.__name__} {' '.join(options)}".strip(): partial(train, partial(kind, lr=0.01, **options))
        for kind, options in [
            (optim.SGD, {}),
            (optim.SGD, {"maximize": True}),
            (optim.SGD, {"weight_decay": 0.1, "foreach": True}),
            (optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
            (optim.SGD, {"momentum": 0.9, "fused": True}),
            (optim.Adam, {}),
            (optim.Adam, {"amsgrad": True, "maximize": True}),
            (optim.AdamW, {"fused": True}),
            (optim.Adam, {"fused": True, "amsgrad": True, "maximize": True}),
            (optim.AdamW, {"foreach": True}),
            (optim.NAdam, {}),
            (optim.Adamax, {}),
            (optim.Adagrad, {}),
            (optim.Adagrad, {"fused": True}),
            (optim.Adadelta, {}),
            (optim.RMSprop, {"centered": True, "momentum": 0.5}),
            (optim.Rprop, {}),
            (optim.ASGD, {}),
            (optim.Adafactor, {}),
            (Lamb, {}),
            (MySGD, {"momentum": 0.9}),
        ]
    },
    "RAdam": lambda: train(partial(optim.RAdam, lr=0.01), steps=7),  # the sixth step is the first that it rectifies
    "Muon": lambda: train(partial(optim.Muon, lr=0.01), Matrices()),
    "groups": lambda: train(grouped),
    "groups, schedule": lambda: train(
        grouped, schedule=lambda o: optim.lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=9, cycle_momentum=True)
    ),
    "groups, clipped": lambda: train(partial(grouped, fused=True), clip_grad_norm=0.05),
    "fp16": lambda: train(grouped, autocast="fp16"),
    "fp16, fused, clipped": lambda: train(partial(grouped, fused=True), autocast="fp16", clip_grad_norm=0.1),
    "Lamb, clipped": lambda: train(Lamb, clip_grad_norm=0.05),
    "bfloat16": bfloat16,
    "added": added,
    "loaded": partial(loaded, optim.NAdam),
    "loaded, fused": partial(loaded, partial(optim.AdamW, fused=True)),
    "forgotten, fused": forgotten,
    "SGD, switched": switched,
    "groups, schedule, fused": lambda: train(
        partial(grouped, fused=True),
        schedule=lambda o: optim.lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=9, cycle_momentum=True),
    ),
    "one fused group": lambda: train(one_fused_group),
    "rate in a tensor, fused": lambda: train(lambda params: optim.AdamW(params, lr=torch.tensor(0.01), fused=True)),
    "bfloat16, fused": partial(bfloat16, fused=True),
    "bfloat16, Adafactor, two threads": lambda: on_unlike_threads(partial(bfloat16, optim.Adafactor, foreach=True)),
    "two types, fused": partial(two_types, fused=True),
}

if __name__ == "__main__":
    for name in sys.argv[2:] or VARIANTS:
        sha = VARIANTS[name]()
        if os.environ.get("RANK", "0") == "0":
            print(f"{name} = {sha}", flush=True)
