"""A random training program: a description that follows from a seed alone, and what it describes.

`print(describe(17))` shows one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from random_optimizers import OptimizerOf, draw_optimizer
from random_parts import ODD, ORDINARY, PARTS, STEMS, TOKENS, VALUES, WORDS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset

import unisono

CLASSES = 4


@dataclass(frozen=True)
class Architecture:
    stem: str
    parts: tuple[str, ...]
    width: int
    dtype: torch.dtype

    def build(self) -> nn.Module:
        return Net(self).to(self.dtype) if self.dtype != torch.float32 else Net(self)


class Net(nn.Module):
    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.stem = STEMS[architecture.stem](architecture.width)
        self.parts = nn.ModuleList(PARTS[name](architecture.width) for name in architecture.parts)
        self.head = nn.Linear(architecture.width, CLASSES)
        self.dtype = architecture.dtype

    def forward(self, values: Tensor, tokens: Tensor) -> Tensor:
        h = self.stem(values.to(self.dtype), tokens)
        for part in self.parts:
            h = part(h)
        return self.head(h).float()


@dataclass(frozen=True)
class Stop:
    """Where and how a run is interrupted."""

    how: str
    """ "steps" ends it in order, "error" by an exception in the loop, "killed" by SIGKILL."""
    after: int
    """Steps before it."""


@dataclass(frozen=True)
class Program:
    """All that a run is a function of."""

    seed: int
    models: tuple[Architecture, ...]
    optimizers: tuple[OptimizerOf, ...]
    virtual_ranks: int
    samples: int
    dataset: str
    batch_size: int
    options: dict[str, Any]
    """Further arguments of `batches`."""
    loss: str
    trainer: dict[str, Any]
    """Further arguments of Trainer."""
    frozen_part: int | None
    """The part of the first model that is frozen in the second epoch."""
    plateau: bool
    evaluates: bool
    every_steps: int
    stop: Stop
    epochs: int = 2

    def __str__(self) -> str:
        return "\n".join(f"{field.name} = {getattr(self, field.name)}" for field in fields(self))


def describe(seed: int) -> Program:
    """Draw the program of a seed."""
    rng = random.Random(f"training program {seed}")
    models = tuple(_draw_architecture(rng) for _ in range(1 if rng.random() < 0.85 else 2))
    optimizers = tuple(each for i, model in enumerate(models) for each in _draw_optimizers(rng, i, model))
    # From 1 to 16, and rather fewer than more: each takes a forward pass.
    virtual_ranks, samples = 1 + int(16 * rng.random() ** 1.8), rng.randint(17, 45)
    batch_size = max(virtual_ranks, rng.randint(samples // 4, samples // 2))
    drop_last = rng.random() < 0.2
    steps = samples // batch_size if drop_last else -(-samples // batch_size)
    trainer: dict[str, Any] = {"seed": rng.randrange(1000), "overlap": rng.random() < 0.8}
    if rng.random() < 0.3:
        trainer["clip_grad_norm"] = rng.choice([0.05, 1.0])
    if rng.random() < 0.3:
        trainer["ema_decay"] = rng.choice([0.5, 0.99])
    if rng.random() < 0.25:
        trainer["autocast"] = rng.choice(["bf16", "fp16"])
    if rng.random() < 0.3:
        trainer["scheduler_interval"] = "epoch"
    evaluates = rng.random() < 0.4
    plateau = evaluates and all(each.schedule is None for each in optimizers) and rng.random() < 0.5
    how = rng.choice(["steps", "error", "error", "killed"])
    return Program(
        seed=seed,
        models=models,
        optimizers=optimizers,
        virtual_ranks=virtual_ranks,
        samples=samples,
        dataset=rng.choice(["plain", "plain", "plain", "augmented", "stream"]),
        batch_size=batch_size,
        options={
            "micro_batch_size": rng.choice([None, None, 1, 2, 3]),
            "workers": rng.choices([0, 1, 2], [18, 1, 1])[0],
            "drop_last": drop_last,
        },
        loss=rng.choice(["per sample", "mean", "weighted", "some weigh nothing"]),
        trainer=trainer,
        frozen_part=rng.randrange(len(models[0].parts)) if rng.random() < 0.15 else None,
        plateau=plateau,
        evaluates=evaluates,
        every_steps=rng.choice([1, 2, 1000]),
        stop=Stop(how, rng.choice(range(1, 2 * steps))),
    )


def _draw_architecture(rng: random.Random) -> Architecture:
    parts = [rng.choice(list(ORDINARY)) for _ in range(rng.randint(1, 3))]
    parts += [rng.choice(list(ODD)) for _ in range(rng.randint(0, 2))]
    rng.shuffle(parts)
    return Architecture(
        stem=rng.choice(list(STEMS)),
        parts=tuple(parts),
        width=rng.choice([6, 10, 14, 66]),
        dtype=rng.choices([torch.float32, torch.bfloat16, torch.float64], [8, 1, 1])[0],
    )


def _draw_optimizers(rng: random.Random, model: int, architecture: Architecture) -> Iterator[OptimizerOf]:
    if "sparse" in architecture.stem:
        if rng.random() < 0.3:
            yield draw_optimizer(rng, model=model, members="all with tables", kinds=["SGD", "Adagrad"])
            return
        yield draw_optimizer(rng, model=model, members="tables", kinds=["SparseAdam", "SparseAdam", "SGD", "Adagrad"])
        yield draw_optimizer(rng, model=model, members="dense")
    elif rng.random() < 0.1:
        yield draw_optimizer(rng, model=model, members="matrices", kinds=["Muon"])
        yield draw_optimizer(rng, model=model, members="others")
    else:
        yield draw_optimizer(rng, model=model)


def members_of(model: nn.Module, members: str) -> list[Tensor]:
    """The parameters of a model that an optimizer is given."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    chosen = {
        "tables": lambda p: any(p is table for table in tables),
        "dense": lambda p: all(p is not table for table in tables),
        "matrices": lambda p: p.dim() == 2 and not p.is_complex() and p.numel() > 0,
        "others": lambda p: p.dim() != 2 or p.is_complex() or not p.numel(),
    }.get(members, lambda p: True)
    return [p for p in model.parameters() if chosen(p)]


def _sample(seed: int, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + index)
    label = torch.randint(0, CLASSES, (), generator=generator)
    values = torch.randn(VALUES, generator=generator) + 0.3 * label
    tokens = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    return values, tokens, label, torch.rand((), generator=generator)


class Samples(Dataset[Any]):
    def __init__(self, program: Program) -> None:
        self.augments = program.dataset == "augmented"
        self.samples = [_sample(program.seed, i) for i in range(program.samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values, *others = self.samples[index]
        if self.augments:
            values = values + 0.1 * torch.randn(VALUES) + random.random()
        return values, *others


class Stream(IterableDataset[Any]):
    def __init__(self, program: Program) -> None:
        self.samples = Samples(program)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        for i in range(len(self.samples)):
            values, *others = self.samples[i]
            yield values * (1 + 0.1 * torch.randn(())), *others


def build_loss(program: Program, *, model: int) -> Any:
    """The loss of one model; that of a second one builds on what the first one says."""

    def output(models: Any, batch: Any) -> Tensor:
        if len(program.models) == 1:
            return models(batch[0], batch[1])
        first = models["0"](batch[0], batch[1])
        return first if model == 0 else models["1"](batch[0], batch[1]) + 0.1 * first

    def loss(models: Any, batch: Any) -> Any:
        losses = F.cross_entropy(output(models, batch), batch[2], reduction="none")
        if program.loss == "per sample":
            return losses
        if program.loss == "mean":
            return losses.mean()
        weights = batch[3] if program.loss == "weighted" else (batch[3] > 0.15).float()
        return unisono.Sum((losses * weights).sum(), weights.sum())

    return loss
