"""Train unusual parameters and buffers, and print what came of each: a digest, or the sentence that refuses it.

unisono run -n 3 odd.py FOLDER [ENGINE [resumed]]
"""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.errors import UnisonoError

FOLDER, ENGINE = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "auto"
RESUMES = sys.argv[3:] == ["resumed"]
VIRTUAL_RANKS = 4
RUNS = count()


class Odd(nn.Module):
    """A linear model with one more parameter, and what a case does in the forward pass."""

    def __init__(self, extra=None, **buffers):
        super().__init__()
        self.main = nn.Linear(8, 3)
        self.extra = extra
        self.calls = []
        for name, value in buffers.items():
            own = None if value is None else value.clone()
            self.register_buffer(name.removeprefix("fleeting_"), own, persistent=not name.startswith("fleeting_"))

    def forward(self, x):
        y = self.main(x)
        if self.extra is not None and self.extra.numel():
            y = y + self.extra.float().abs().sum(-1)
        for call in self.calls:
            y = call(self, x, y)
        return y


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def steps(trainer, dataset, last, between=None):
    for _ in trainer.epochs(9, max_steps=last):
        for batch in trainer.batches(dataset, batch_size=12):
            trainer.step(loss, batch)
            if between is not None:
                between()


def vectors():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(60, 8, generator=generator), torch.arange(60) % 3)


def train(make, *, call=None, between=None, dataset=None, sgd=None, options=None, resumed=False, autocast=None):
    """Train for three steps; with `resumed` also with a stop after two, which must change nothing."""

    def run(last, directory=None):
        torch.manual_seed(1)
        model = make()
        model.calls = [call] if call else []
        kind = torch.optim.SGD if sgd is not None else torch.optim.AdamW
        optimizer = kind(model.parameters(), lr=0.05, **(sgd or options or {}))
        trainer = unisono.Trainer(
            model,
            optimizer,
            virtual_ranks=VIRTUAL_RANKS,
            engine=ENGINE,
            progress=False,
            directory=directory,
            autocast=autocast,
        )
        steps(trainer, dataset or vectors(), last, between and (lambda: between(model)))
        return trainer.digest()

    whole = run(3)
    if resumed and RESUMES:
        directory = FOLDER / f"run{next(RUNS)}"
        run(2, directory)
        assert run(3, directory) == whole
    return whole


class Images(nn.Module):
    """A convolution in channels_last."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Conv2d(3, 6, 3), []
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        return self.layer(x).mean((2, 3))[:, :3]


def channels_last(resumed=True, **options):
    generator = torch.Generator().manual_seed(5)
    images = TensorDataset(torch.randn(60, 3, 6, 6, generator=generator), torch.arange(60) % 3)
    return train(Images, dataset=images, resumed=resumed, **options)


def strided():
    return Odd(nn.Parameter(torch.randn(3, 16)[:, ::2]))


def unaligned():
    return Odd(nn.Parameter(torch.randn(40)[1:25].view(3, 8)))


def tied_by_data():
    model = Odd(nn.Parameter(torch.zeros(3, 8)))
    model.extra.data = model.main.weight.data
    return model


def empty_last():
    return Odd(nn.Parameter(torch.zeros(3, 0)))


def lazily_negated():
    return Odd(nn.Parameter(torch._neg_view(torch.randn(3, 8))))


def other_gradients():
    model = Odd(nn.Parameter(torch.randn(3, 8).bfloat16()))
    model.extra.grad_dtype = torch.float32
    return model


def mixed_types():
    return Odd(nn.Parameter(torch.randn(3, 8).double()))


def adafactor():
    model = mixed_types()
    optimizer = torch.optim.Adafactor(model.parameters())
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=VIRTUAL_RANKS, engine=ENGINE, progress=False)
    steps(trainer, vectors(), 1)


def scripted():
    torch.manual_seed(1)
    model = torch.jit.script(nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=VIRTUAL_RANKS, engine=ENGINE, progress=False)
    steps(trainer, vectors(), 3)
    return trainer.digest()


def replaced(how):
    """Replace a layer after two steps."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=VIRTUAL_RANKS, engine=ENGINE, progress=False)
    steps(trainer, vectors(), 2)
    if how == "assigned":
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    else:
        model[1] = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    if how == "with the optimizer":
        optimizer.param_groups[0]["params"] = list(model.parameters())
    steps(trainer, vectors(), 4)
    return trainer.digest()


# What a forward pass or the loop does.


def tick(model, x, y):
    model.seen.add_(1)
    return y


def fill(model, x, y):
    model.scale = x.mean().detach().expand(3).clone() if model.scale is None else model.scale * 0.9 + x.mean().detach()
    return y * (1 + model.scale)


def fill_in_some(model, x, y):
    if x.mean() > 0:
        model.scale = x.mean().detach()
    return y


def average(model, x, y):
    model.scale.mul_(0.9).add_(x.mean().detach())
    return y * (1 + model.scale)


def add_to_its_buffer(model, x, y):
    (buffer,) = model._buffers.values()
    buffer.add_(x.detach().mean())
    return y * (1 + buffer)


def exchange_buffers(model):
    (old,) = model._buffers
    value = model._buffers[old].clone()
    delattr(model, old)
    model.register_buffer("second" if old == "first" else "first", value)


def cache(model, x, y):
    model.scale = torch.ones(len(x), 1)
    return y * model.scale


def register(model, x, y):
    model.register_buffer("late", x.mean().detach())
    return y


def forget(model, x, y):
    model.scale = None
    return y


def momentum_in_forward(model, x, y):
    model.extra.data = model.extra.data * 0.9 + model.main.weight.data * 0.1
    return y


def momentum_unseen(model, x, y):
    model.extra.data.mul_(0.9).add_(model.main.weight.data, alpha=0.1)
    return y


def clip_weights(model, x, y):
    with torch.no_grad():
        model.main.weight.mul_(0.99)
    return y


def clip_weights_for_backward(model, x, y):
    y = y + y @ model.main.weight[:, :3]  # autograd refuses to go back through a weight that was written to
    return clip_weights(model, x, y)


def momentum_in_loop(model):
    with torch.no_grad():
        model.extra.mul_(0.9).add_(model.main.weight, alpha=0.1)


def there_and_back(model):
    model.double().float()  # torch writes p.grad.data, too


def other_strides(model):
    model.to(memory_format=torch.contiguous_format)


def gradients_moved(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data = p.grad.data * 0


def frozen():
    return Odd(nn.Parameter(torch.randn(3, 8), requires_grad=False))


def with_buffer(**buffers):
    return lambda: Odd(**buffers)


CASES = {
    "channels_last AdamW": lambda: channels_last(options={"fused": True}),
    "channels_last SGD": lambda: channels_last(sgd={"momentum": 0.9, "fused": True}),
    "other strides in the loop": lambda: channels_last(False, between=other_strides, sgd={"momentum": 0.9}),
    "other strides in the loop, fused": lambda: channels_last(False, between=other_strides, options={"fused": True}),
    "converted and back in the loop": lambda: train(Odd, between=there_and_back, sgd={"momentum": 0.9}),
    "gradients exchanged in the loop": lambda: train(Odd, between=gradients_moved, sgd={}),
    "strided": lambda: train(strided),
    "strided, fused": lambda: train(strided, options={"fused": True}),
    "unaligned": lambda: train(unaligned),
    "tied by data": lambda: train(tied_by_data, resumed=True),
    "empty last": lambda: train(empty_last),
    "expanded": lambda: train(lambda: Odd(nn.Parameter(torch.randn(3, 1).expand(3, 8)))),
    "lazily negated": lambda: train(lazily_negated),
    "other gradients": lambda: train(other_gradients, sgd={}),
    "differentiable": lambda: train(Odd, sgd={"differentiable": True}),
    "half and fp16": lambda: train(lambda: Odd(nn.Parameter(torch.randn(3, 8).half())), autocast="fp16"),
    "fused sgd of bf16": lambda: train(lambda: Odd(nn.Parameter(torch.randn(3, 99).bfloat16())), sgd={"fused": True}),
    "adafactor of two types": adafactor,
    "scripted": scripted,
    "assigned": lambda: replaced("assigned"),
    "replaced": lambda: replaced("alone"),
    "replaced with the optimizer": lambda: replaced("with the optimizer"),
    "int64": lambda: train(with_buffer(seen=torch.full((2,), 2**60 + 1)), call=tick, resumed=True),
    "uint64": lambda: train(with_buffer(seen=torch.tensor([2**64 - 9], dtype=torch.uint64)), call=lambda m, x, y: y),
    "none": lambda: train(with_buffer(scale=None), call=fill, resumed=True),
    "none, fleeting": lambda: train(with_buffer(fleeting_scale=None), call=fill, resumed=True),
    "none, filled in some": lambda: train(with_buffer(scale=None), call=fill_in_some),
    "fleeting": lambda: train(with_buffer(fleeting_scale=torch.zeros(3)), call=average, resumed=True),
    "exchanged": lambda: train(with_buffer(first=torch.ones(1)), call=add_to_its_buffer, between=exchange_buffers),
    "cache": lambda: train(with_buffer(fleeting_scale=torch.zeros(1)), call=cache, resumed=True),
    "cache of none": lambda: train(with_buffer(fleeting_scale=None), call=cache, resumed=True),
    "reshaped": lambda: train(with_buffer(scale=torch.zeros(1)), call=cache),
    "registered late": lambda: train(Odd, call=register),
    "set to none": lambda: train(with_buffer(scale=torch.zeros(1)), call=forget),
    "momentum in the loop": lambda: train(frozen, between=momentum_in_loop, resumed=True),
    "momentum in forward": lambda: train(frozen, call=momentum_in_forward),
    "momentum unseen": lambda: train(frozen, call=momentum_unseen),
    "weights written in forward": lambda: train(Odd, call=clip_weights),
    "weights for backward written": lambda: train(Odd, call=clip_weights_for_backward),
}

if __name__ == "__main__":
    for name, case in CASES.items():
        try:
            came = case()
        except (UnisonoError, ValueError) as error:
            came = f"{type(error).__name__}: {error}"
        print(f"{name} = {came}", flush=True)
