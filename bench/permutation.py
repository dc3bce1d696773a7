"""The order of an epoch: `plan.permute` against a list that is shuffled.

The peer of the first rows is the first index of torch's DistributedSampler(shuffle=True), one of two ranks, over 5·10⁷
samples only: over 10⁹, where ours is measured, it would take over a minute and tens of gigabytes. The rates compare
indices that are computed with indices of one torch.randperm of 5·10⁷. Every call has an epoch that was not seen before,
so nothing comes from a cache. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, cast

import torch
from torch.utils.data import Dataset, DistributedSampler

from bench.measure import Effort, alternate, timed
from bench.rows import Goal, Row, summarise
from unisono.plan import permute

__all__ = ["run"]

_BATCH = 128


def run(effort: Effort) -> Iterator[Row]:
    """Measure the first batch and the rate."""
    torch.set_num_threads(1)
    peer_samples = 50_000 if effort.quick else 50_000_000
    yield _first_batch(effort, peer_samples)
    for num_samples, label in ((10**9, "10⁹"), (2**40, "2⁴⁰")):
        for positions in (2**20, 8192):
            yield _rate(effort, num_samples, f"of {label}, {positions} at once", positions, peer_samples)


def _first_batch(effort: Effort, peer_samples: int) -> Row:
    dataset = cast(Dataset[Any], range(peer_samples))  # of which the sampler asks the length only
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, num_replicas=2, rank=0, shuffle=True)
    epochs, positions = count(), torch.arange(_BATCH)

    def first_index() -> None:
        sampler.set_epoch(next(epochs))
        next(iter(sampler))

    pairs = alternate(
        timed(lambda: permute(positions, num_samples=10**9, seed=0, epoch=next(epochs))),
        timed(first_index),
        rounds=effort.rounds(7),
        warmup=1,
    ).scaled(1e3)
    return summarise(
        "permutation",
        f"first {_BATCH} indices of 10⁹",
        **pairs._asdict(),
        peer_name=f"DistributedSampler, first index of {peer_samples:.0e}",
        unit="ms",
        goal=Goal(of="ours", bound=5.0),
        num_samples=10**9,
        peer_num_samples=peer_samples,
    )


def _rate(effort: Effort, num_samples: int, case: str, numel: int, peer_samples: int) -> Row:
    epochs = count()
    calls = max(1, 2**20 // numel)
    starts = torch.randint(num_samples - numel, (calls,)).tolist()
    chunks = [torch.arange(start, start + numel) for start in starts]

    def indices() -> None:
        epoch = next(epochs)
        for positions in chunks:
            permute(positions, num_samples=num_samples, seed=0, epoch=epoch)

    pairs = alternate(
        timed(indices), timed(lambda: torch.randperm(peer_samples)), rounds=effort.rounds(7), warmup=1
    ).as_rates(ours=calls * numel / 1e6, peer=peer_samples / 1e6)
    return summarise(
        "permutation",
        f"indices {case}",
        **pairs._asdict(),
        peer_name=f"torch.randperm({peer_samples:.0e})",
        unit="million/s",
        goal=Goal(of="ours", bound=10.0),
        num_samples=num_samples,
        at_once=numel,
    )
