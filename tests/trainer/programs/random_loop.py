"""Run random training loops and print what each comes to: `random_loop.py HOW SEED ... [--folder F [--stop]]`.

SEED is a number or a range such as 0-7. With a folder, loops go on from their checkpoints there; with --stop, each ends
after some steps. Loops have enough virtual ranks for 3 ranks, or for N with --ranks N.

Between its steps a loop freezes and thaws layers, changes modes, learning rates and decay, evaluates and predicts; its
steps are of one optimizer, of several together or one after the other, with losses of all forms. What it does depends
on the seed alone. HOW is an engine, or how the model is divided; with "+", a loop also does what a divided model
refuses: gradients that are changed before the update, and a loss over encodings of the whole batch.
"""

from __future__ import annotations

import argparse
import hashlib
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import unisono
from unisono.parallel import Pipeline, Shard

parser = argparse.ArgumentParser()
parser.add_argument("how")
parser.add_argument("seeds", nargs="+")
parser.add_argument("--folder")
parser.add_argument("--stop", action="store_true")
parser.add_argument("--ranks", type=int, default=3)
ARGS = parser.parse_args()
HOW = ARGS.how
ALL = HOW.endswith("+")
DIVIDED: dict[str, Callable[[int], Any]] = {
    "block": lambda ranks: Shard(unit_bytes=1),
    "size": lambda ranks: Shard(by="size", unit_bytes=300),
    "zero1": lambda ranks: Shard(zero=1),
    "stages": lambda ranks: Pipeline(stages=["middle"] if ranks == 2 else ["middle", "head"]),
}
OPTIMIZERS: list[Callable[[Any], optim.Optimizer]] = [
    lambda p: optim.SGD(p, lr=0.05, momentum=0.9),
    lambda p: optim.AdamW(p, lr=0.01),
    lambda p: optim.AdamW(p, lr=0.01, fused=True),
    lambda p: optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    lambda p: optim.Adagrad(p, lr=0.05),
    lambda p: optim.RMSprop(p, lr=0.01, centered=True),
    optim.Adadelta,
    lambda p: optim.NAdam(p, lr=0.01),
    lambda p: optim.RAdam(p, lr=0.01),
    lambda p: optim.ASGD(p, lr=0.05),
    lambda p: optim.Rprop(p, lr=0.01),
]
SCHEDULERS: list[Callable[[optim.Optimizer], Any]] = [
    lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.7),
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 7),
]


class Net(nn.Module):
    """Has a buffer that the forward pass writes, and a layer that most losses do not use."""

    def __init__(self, norm: nn.Module, dropout: float) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(6, 9), norm, nn.Dropout(dropout)
        self.middle, self.head, self.encoder = nn.Linear(9, 9), nn.Linear(9, 3), nn.Linear(9, 4)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def hidden(self, x):
        return torch.tanh(self.norm(self.first(x)))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.head(torch.tanh(self.middle(self.dropout(self.hidden(x))))) * self.scale


def per_sample(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def mean(model, batch):
    return per_sample(model, batch).mean()


def weighted(model, batch):
    weights = (batch[1] + 1).float()
    return unisono.Sum((per_sample(model, batch) * weights).sum(), weights.sum())


def with_values(model, batch):
    out = model(batch[0])
    return {"loss": F.cross_entropy(out, batch[1], reduction="none"), "right": (out.argmax(1) == batch[1]).float()}


def noisy(model, batch):
    return per_sample(model, (batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]))


LOSSES = [per_sample, mean, weighted, with_values, noisy]


def contrast(model, encodings):
    return F.cross_entropy(encodings @ encodings.t(), torch.arange(len(encodings)), reduction="none")


def clamp(model):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.clamp_(-0.05, 0.05)


class Loop:
    """A loop whose choices are those of a generator: the same on all ranks."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        norm = draw.choice([nn.BatchNorm1d(9), nn.LayerNorm(9), nn.Identity()])
        self.model = model = Net(norm, draw.choice([0.0, 0.2]))
        self.samples = draw.randint(20, 60)
        self.data = TensorDataset(torch.randn(self.samples, 6), torch.randint(0, 3, (self.samples,)))
        early = [*model.first.parameters(), *model.norm.parameters(), *model.middle.parameters()]
        late = [*model.head.parameters(), *model.encoder.parameters(), model.scale]
        self.is_joint = draw.random() < 0.4
        parts = {"all": [*early, *late]} if self.is_joint else {"early": early, "late": late}
        self.optimizers = {name: draw.choice(OPTIMIZERS)(part) for name, part in parts.items()}
        self.virtual_ranks = max(ARGS.ranks, draw.choice([3, 4, 6, 8]))
        options: dict[str, Any] = {"virtual_ranks": self.virtual_ranks, "seed": draw.randint(0, 9), "progress": False}
        options["clip_grad_norm"] = draw.choice([None, 0.1, 1.0])
        options["ema_decay"] = draw.choice([None, None, 0.9])
        options["autocast"] = self.autocast = draw.choice([None, None, "bf16", "fp16"])
        if draw.random() < 0.4:
            options["scheduler"] = {name: draw.choice(SCHEDULERS)(each) for name, each in self.optimizers.items()}
        ranks = unisono.init().world_size
        how = HOW.removesuffix("+")
        options |= {"parallel": DIVIDED[how](ranks) if ranks > 1 else None} if how in DIVIDED else {"engine": how}
        self.size = self.virtual_ranks + draw.choice([0, 1, self.virtual_ranks])
        self.last_step, self.told = 0, []
        self.max_steps = draw.randint(1, 6) if ARGS.folder else None
        if ARGS.folder:
            options |= {"directory": f"{ARGS.folder}/{seed}", "stateful": {"loop": self}}
        draw.seed(seed)  # what follows does not depend on whether it stops
        self.trainer = unisono.Trainer(model, self.optimizers, **options)

    def state_dict(self) -> dict[str, Any]:
        version, numbers, last = self.draw.getstate()
        return {
            "draw": [version, [*numbers], last],
            "told": [*self.told],
            "last_step": self.last_step,
            "trained": [p.requires_grad for p in self.model.parameters()],
            "mode": self.model.norm.training,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, numbers, last = state["draw"]
        self.draw.setstate((version, (*numbers,), last))
        self.told, self.last_step = [*state["told"]], state["last_step"]
        for p, is_trained in zip(self.model.parameters(), state["trained"], strict=True):
            p.requires_grad_(is_trained)
        self.model.norm.train(state["mode"])

    def run(self) -> str:
        """Train, and return a digest of all results."""
        draw, trainer = self.draw, self.trainer
        for _ in trainer.epochs(2, max_steps=self.max_steps if ARGS.stop else None):
            for batch in trainer.batches(self.data, batch_size=self.size):
                if not batch.step:
                    self.last_step = draw.randint(1, 5)
                for _ in range(draw.choice([1, 1, 2])):
                    self.act()
                    result = self.step(batch)
                    self.told.append(f"{float(result):.17g} {result.grad_norm} {result.skipped} {dict(result.values)}")
                if batch.step == self.last_step:
                    break
        self.told += [trainer.digest(), str(float(self.model.calls))]
        return hashlib.sha256("\n".join(self.told).encode()).hexdigest()

    def step(self, batch) -> Any:
        draw, trainer = self.draw, self.trainer
        name = None if self.is_joint else draw.choice([None, "early", "late"])
        special, loss = draw.random(), draw.choice(LOSSES)
        if ALL and special < 0.2:
            return trainer.step(loss, batch, optimizer=name, on_gradients=clamp)
        if ALL and special < 0.4 and self.autocast is None and batch.size % self.virtual_ranks == 0:
            encode = lambda model, batch: model.encoder(model.hidden(batch[0]))  # noqa: E731
            return trainer.step(contrast, batch, optimizer=name, encode=encode)
        return trainer.step(loss, batch, optimizer=name)

    def act(self) -> None:
        """Do something between two steps."""
        draw, model, trainer = self.draw, self.model, self.trainer
        action, on = draw.randrange(16), draw.random() < 0.5
        layer = draw.choice([model.first, model.middle, model.head])
        group = draw.choice([*self.optimizers.values()]).param_groups[0]
        if action < 3:
            layer.requires_grad_(on)
            model.first.bias.requires_grad_(True)  # something is left to train
        elif action == 3:
            layer.weight.requires_grad_(on)
        elif action == 4:
            model.norm.train(on)
        elif action == 5:
            group["lr"] = 0.9 * group["lr"]
        elif action == 6:
            group["weight_decay"] = 0.01
        elif action == 7:
            model.zero_grad(set_to_none=on)
        elif action == 8:
            found = trainer.evaluate(draw.choice(LOSSES), self.data, batch_size=draw.choice([8, 13]))
            self.told.append(str(found))
        elif action == 9:
            out = trainer.predict(lambda model, batch: model(batch[0]), self.data, batch_size=9, to="all").float()
            self.told.append(hashlib.sha256(out.contiguous().numpy().tobytes()).hexdigest())
        elif action == 10:
            model.calls.zero_()


for each in ARGS.seeds:
    first, _, last = each.partition("-")
    for seed in range(int(first), int(last or first) + 1):
        print(f"loop {seed} = {Loop(seed).run()}", flush=True)
