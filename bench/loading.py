"""Reading an epoch: Trainer.batches against DataLoader with DistributedSampler, in this process, without workers.

Shuffled anew every epoch, 20,000 samples of 256 floats, batches of 128. `TensorDataset` is torch's; the plain dataset
is a class with __len__ and __getitem__ over the same tensors. A plain dataset pays for what Trainer promises of it: all
generators are set before each sample, so that augmentation does not depend on which process does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import unisono
from bench.measure import Effort, alternate, timed
from bench.rows import Row, summarise

__all__ = ["run"]

_BATCH = 128


class _Plain(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, *tensors: Tensor) -> None:
        self._x, self._y = tensors

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._x[index], self._y[index]


def run(effort: Effort) -> Iterator[Row]:
    """Measure both kinds of dataset, with one and with eight virtual ranks."""
    torch.set_num_threads(1)
    samples = 1_000 if effort.quick else 20_000
    tensors = torch.randn(samples, 256), torch.randint(10, (samples,))
    for name, dataset in (("TensorDataset", TensorDataset(*tensors)), ("plain Dataset", _Plain(*tensors))):
        for virtual_ranks in (1, 8):
            pairs = alternate(
                timed(_ours(dataset, virtual_ranks)), timed(_peer(dataset)), rounds=effort.rounds(11), warmup=1
            ).as_rates(ours=samples, peer=samples)
            yield summarise(
                "loading",
                f"{name}, {virtual_ranks} virtual rank" + ("s" if virtual_ranks > 1 else ""),
                **pairs._asdict(),
                peer_name="DataLoader + DistributedSampler",
                unit="samples/s",
                dataset=name,
                virtual_ranks=virtual_ranks,
            )


def _ours(dataset: Dataset[Any], virtual_ranks: int) -> Callable[[], None]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, virtual_ranks=virtual_ranks, progress=False)

    def epoch() -> None:
        for _ in trainer.batches(dataset, batch_size=_BATCH):
            pass

    return epoch


def _peer(dataset: Dataset[Any]) -> Callable[[], None]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
    loader = DataLoader(dataset, batch_size=_BATCH, sampler=sampler)
    epochs = count()

    def epoch() -> None:
        sampler.set_epoch(next(epochs))
        for _ in loader:
            pass

    return epoch
