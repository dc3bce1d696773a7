"""Random models, cut at random places: trains each, and prints "program SEED = " and a digest of all results.

Arguments: seeds. One rank has each model whole; on more, a model that cannot be cut so says "cannot be cut".
"""

import hashlib
import random
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import unisono

WIDTH = 8


class Layer(nn.Module):
    """A block of a random kind."""

    def __init__(self, rng):
        super().__init__()
        kinds = {
            "linear": lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh()],
            "norm": lambda: [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(inplace=rng.random() < 0.5)],
            "layer norm": lambda: [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()],
            "dropout": lambda: [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.SiLU()],
            "frozen": lambda: [nn.Linear(WIDTH, WIDTH), nn.Tanh()],
        }
        kind = rng.choice([*kinds])
        self.layers = nn.Sequential(*kinds[kind]())
        if kind == "frozen":
            self.layers.requires_grad_(False)
        self.is_checkpointed = rng.random() < 0.2
        self.takes_two = rng.random() < 0.3

    def forward(self, x, other):
        if self.takes_two:
            x = x + 0.5 * other
        if self.is_checkpointed and kind_is_plain(self.layers):
            return checkpoint(self.layers, x, use_reentrant=False)
        return self.layers(x)


def kind_is_plain(layers):
    return not any(isinstance(each, nn.BatchNorm1d) for each in layers)  # which would learn twice


class Net(nn.Module):
    """Blocks that use each other's outputs; some are called twice, and some share weights."""

    def __init__(self, rng):
        super().__init__()
        count = rng.randint(4, 7)
        self.blocks = nn.ModuleList(Layer(rng) for _ in range(count))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.twice = rng.randrange(count) if rng.random() < 0.3 else -1
        self.sources = [rng.randrange(number + 1) for number in range(count)]
        self.joins = [rng.choice(["", "add", "cat", "mul", "shift", "noise", "inplace"]) for _ in range(count)]
        if rng.random() < 0.4:
            self.head.weight = self.blocks[0].layers[0].weight if self.has_matrix(0) else self.head.weight
        self.scale_by_shape = rng.random() < 0.5

    def has_matrix(self, number):
        return isinstance(self.blocks[number].layers[0], nn.Linear)

    def forward(self, x):
        kept = [x]
        for number, block in enumerate(self.blocks):
            if self.scale_by_shape and len(x) > 2:
                x = x * 0.9
            x = block(x, kept[self.sources[number]])
            if number == self.twice:
                x = block(x, kept[0])
            other = kept[self.sources[number]]
            match self.joins[number]:
                case "add":
                    x = x + other
                case "cat":
                    x = torch.cat([x, other], 1)[:, ::2]
                case "mul":
                    x = x * torch.sigmoid(other)
                case "shift":
                    x = x + self.shift
                case "noise":
                    x = F.dropout(x, 0.2, self.training)
                case "inplace":
                    x = x * 1
                    x += 0.1
            kept.append(x)
        return self.head(x)


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(1)


def program(seed, ranks):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Net(rng)
    names = [f"blocks.{number}" for number in range(1, len(model.blocks))] + ["head"]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = rng.choice(
        [
            lambda: torch.optim.SGD(trained, lr=0.05, momentum=0.9),
            lambda: torch.optim.AdamW(trained, lr=1e-2),
            lambda: torch.optim.Adagrad(trained, lr=1e-2),
        ]
    )()
    options = {
        "virtual_ranks": rng.choice([4, 5, 8]),
        "clip_grad_norm": rng.choice([None, 0.3]),
        "autocast": rng.choice([None, None, None, "bf16"]),
        "ema_decay": rng.choice([None, 0.7]),
    }
    batch_size, micro_batch_size = rng.choice([9, 12, 16]), rng.choice([None, None, 1, 2])
    x = torch.randn(rng.choice([24, 30, 37]), WIDTH)
    data = TensorDataset(x, x.roll(1, 1))
    # What follows changes no bit.
    if ranks > 1:
        rng = random.Random(f"{seed} {ranks}")
        schedules = ["gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble", "breadth-first", "breadth-first"]
        schedule, count, replicas, zero = rng.choice(schedules), ranks, None, rng.choice([None, 1])
        if schedule == "breadth-first":
            zero = rng.choice([zero, 3, 3])
            if ranks > 3 and ranks % 2 == 0:
                replicas = 2
            size = ranks // (replicas or 1)
            count = size * min(rng.choice([1, 2, 3]), len(names) // size)
        elif schedule == "interleaved":
            count = min(ranks * rng.choice([1, 2]), len(names) // ranks * ranks)
        elif ranks % 2 == 0 and rng.random() < 0.4:
            count = max(2, ranks // 2)
        if not 1 < count <= len(names):
            return "cannot be cut"
        chosen = sorted(rng.sample(range(len(names)), count - 1))
        stages = count if rng.random() < 0.2 else [names[each] for each in chosen]
        options["parallel"] = unisono.parallel.Pipeline(stages=stages, schedule=schedule, replicas=replicas, zero=zero)
    trainer = unisono.Trainer(model, optimizer, progress=False, seed=seed, **options)
    found = []
    try:
        for epoch in trainer.epochs(2):
            for batch in trainer.batches(data, batch_size=batch_size, micro_batch_size=micro_batch_size):
                result = trainer.step(loss, batch)
                found.append((float(result), result.grad_norm))
            found.append(
                trainer.evaluate(loss, data, batch_size=10, ema=options["ema_decay"] is not None and epoch > 0)
            )
    except unisono.errors.CutError:
        return "cannot be cut"
    outputs = trainer.predict(lambda model, batch: model(batch[0]), data, batch_size=10, to="all")
    found += [outputs.tolist(), trainer.digest(), [b.tolist() for b in model.buffers()]]
    return hashlib.sha256(repr(found).encode()).hexdigest()


for each in map(int, sys.argv[1:]):
    print(f"program {each} = {program(each, unisono.init().world_size)}", flush=True)
