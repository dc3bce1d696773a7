"""Random models, uses and options of `replicate` over ranks, against one process. Arguments: backend, first seed, end.

All ranks draw the same numbers, so each knows what the others do.
"""

from __future__ import annotations

import copy
import random
import sys
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import unisono
from unisono.parallel import replicate

unisono.init(sys.argv[1])
RANK, SIZE = unisono.rank(), unisono.world_size()
WIDTH = 6


class Net(nn.Module):
    """A chain of layers, of which a call names some, in any order and more than once."""

    def __init__(self, layers: int, *, norms: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
            if norms and i % 2
            else nn.Linear(WIDTH, WIDTH)
            for i in range(layers)
        )

    def forward(self, x: Tensor, path: list[tuple[int, str]]) -> Tensor:
        for i, way in path:
            layer = self.layers[i]
            x = torch.tanh(layer(x) if way == "plain" else checkpoint(layer, x, use_reentrant=way == "reentrant"))
        return x.square().mean()


def batch(seed: int, step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed * 1000 + step * 10 + rank)).double()


def play(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    norms = draw.random() < 0.3
    models = [Net(draw.randint(1, 5), norms=norms).double() for _ in range(draw.choice([1, 1, 2]))]
    references = copy.deepcopy(models)
    average = draw.random() < 0.8
    replicas = replicate(
        models,
        bucket_mb=draw.choice([1e-5, 3e-4, 1.0]),
        first_bucket_mb=draw.choice([1e-5, 1.0]),
        overlap=draw.random() < 0.8,
        average=average,
        buffers=None,
    )
    total = 1 if average else SIZE
    ways = ["plain"] if norms else ["plain", "plain", "saved", "reentrant"]
    moods = draw.choice([["same"], ["same", "other"], ["other"]])
    paths: list[list[tuple[int, str]]] = []
    for step in range(draw.randint(3, 14)):
        which = draw.randrange(len(models))
        model, reference = models[which], references[which]
        for m in (*models, *references):
            if draw.random() < 0.7:
                m.zero_grad(set_to_none=draw.random() < 0.7)
        # What is zeroed must be the same on both sides.
        for m, r in zip(models, references, strict=True):
            for p, q in zip(m.parameters(), r.parameters(), strict=True):
                q.grad = None if p.grad is None else p.grad.clone()
        for micro in range(draw.randint(1, 3)):
            last = draw.random() < 0.5
            n = len(model.layers)
            mood = draw.choice(moods)
            common = [(draw.randrange(n), draw.choice(ways)) for _ in range(draw.randint(1, 4))]
            paths = [
                common
                if mood == "same"
                else [(draw.randrange(n), draw.choice(ways)) for _ in range(draw.randint(1, 4))]
                for _ in range(SIZE)
            ]
            with nullcontext() if last else replicas.no_sync():
                model(batch(seed, step * 3 + micro, RANK).requires_grad_(), paths[RANK]).backward()
            for rank in range(SIZE):
                loss = reference(batch(seed, step * 3 + micro, rank).requires_grad_(), paths[rank])
                (loss * total / SIZE).backward()
        if not last:
            replicas.synchronize()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (seed, step, name, paths)
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad, msg=lambda m, s=(seed, step, name): f"{s}: {m}")
        if average and draw.random() < 0.5:
            with torch.no_grad():
                for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                    if p.grad is not None:
                        q.copy_(p.sub_(p.grad, alpha=0.05))
    replicas.close()


for seed in range(int(sys.argv[2]), int(sys.argv[3])):
    play(seed)
print("played", flush=True)
