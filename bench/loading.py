"""Reading an epoch: Trainer.batches against DataLoader with DistributedSampler.

Shuffled anew every epoch, 20,000 samples of 256 floats, batches of 128, without workers unless a row names them.
`TensorDataset` is torch's; the plain dataset is a class with __len__ and __getitem__ over the same tensors. The noisy
one adds noise from torch's generator, the flipping one reverses some samples by Python's, and the mirroring one by
NumPy's. These three pay for what a Trainer promises: a generator that they draw from is seeded before each sample, so
that augmentation does not depend on which process does it. With 8 virtual ranks a batch is 8 micro-batches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import unisono
from bench.measure import Effort, alternate, timed
from bench.rows import Goal, Row, summarise

__all__ = ["run"]

_BATCH = 128


class _Plain(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, *tensors: Tensor) -> None:
        self._x, self._y = tensors

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


class _Noisy(_Plain):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(256), y


class _Flipping(_Plain):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return (x.flip(0) if random.random() < 0.5 else x), y


class _Mirroring(_Plain):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return (x.flip(0) if np.random.rand() < 0.5 else x), y


class _Named(_Plain):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return {"features": x, "label": y, "index": index}


class _Case(NamedTuple):
    name: str
    kind: Callable[..., Dataset[Any]]
    virtual_ranks: int
    workers: int = 0
    least: float | None = None
    """The smallest ratio that is a success."""


_CASES = (
    _Case("TensorDataset", TensorDataset, 1),
    _Case("TensorDataset", TensorDataset, 8),
    _Case("plain Dataset", _Plain, 1),
    _Case("plain Dataset", _Plain, 8, least=0.8),
    _Case("plain Dataset", _Plain, 8, workers=2, least=0.8),
    _Case("Dataset of dicts", _Named, 8, least=0.8),
    _Case("noisy Dataset", _Noisy, 8, least=0.4),
    _Case("noisy Dataset", _Noisy, 8, workers=2, least=0.4),
    _Case("flipping Dataset", _Flipping, 8, least=0.4),
    _Case("flipping Dataset", _Flipping, 8, workers=2, least=0.4),
    _Case("mirroring Dataset", _Mirroring, 8, least=0.4),
)


def run(effort: Effort) -> Iterator[Row]:
    """Measure each kind of dataset."""
    torch.set_num_threads(1)
    samples = 1_000 if effort.quick else 20_000
    tensors = torch.randn(samples, 256), torch.randint(10, (samples,))
    for case in _CASES:
        dataset = case.kind(*tensors)
        pairs = alternate(
            timed(_ours(dataset, case.virtual_ranks, case.workers)),
            timed(_peer(dataset, case.workers)),
            rounds=effort.rounds(11),
            warmup=1,
        ).as_rates(ours=samples, peer=samples)
        ranks = f"{case.virtual_ranks} virtual rank" + ("s" if case.virtual_ranks > 1 else "")
        yield summarise(
            "loading",
            f"{case.name}, {ranks}" + (f", {case.workers} workers" if case.workers else ""),
            **pairs._asdict(),
            peer_name="DataLoader + DistributedSampler",
            unit="samples/s",
            goal=None if case.least is None else Goal(of="ratio", bound=case.least),
            dataset=case.name,
            virtual_ranks=case.virtual_ranks,
            workers=case.workers,
        )


def _ours(dataset: Dataset[Any], virtual_ranks: int, workers: int = 0) -> Callable[[], None]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=virtual_ranks, progress=False)

    def epoch() -> None:
        for _ in trainer.batches(dataset, batch_size=_BATCH, workers=workers):
            pass

    return epoch


def _peer(dataset: Dataset[Any], workers: int = 0) -> Callable[[], None]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(
        dataset, batch_size=_BATCH, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    epochs = count()

    def epoch() -> None:
        sampler.set_epoch(next(epochs))
        for _ in loader:
            pass

    return epoch
