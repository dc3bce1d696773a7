"""Seeds for a loop of one's own: all generators of a process, and those of DataLoader workers.

The Trainer needs none of this: it sets generators itself, from the plan.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch

from unisono.arguments import whole
from unisono.job.ranks import rank
from unisono.plan import derive_key
from unisono.state.random import set_generators

__all__ = ["LoaderSeeds", "seed_everything", "seed_worker"]


class LoaderSeeds(NamedTuple):
    """What a torch DataLoader takes for its seeds: `DataLoader(..., generator=..., worker_init_fn=...)`."""

    generator: torch.Generator
    """Of this rank, also with same=True: workers of different ranks must not draw the same."""
    worker_init_fn: Callable[[int], None]
    """Seeds Python's and NumPy's generators in a worker."""


def seed_everything(seed: int, *, same: bool = False) -> LoaderSeeds:
    """Seed torch (all devices), Python and NumPy in this process, differently on every rank.

    Ranks that drew the same numbers would drop out and augment alike.
    Args: same gives all ranks the same numbers: for building a model that must be equal everywhere.
    Returns: generator and worker_init_fn for a torch DataLoader, always of this rank.
    Raises: TypeError if the seed is no whole number.
    """
    seed = whole("seed", seed)
    own = rank()
    if find_spec("numpy") is not None:
        import_module("numpy")  # imported later, its generator would not be seeded
    key = derive_key(seed, "job") if same else derive_key(seed, "rank", own)
    set_generators(key)
    torch.manual_seed(key)  # every device
    generator = torch.Generator().manual_seed(derive_key(seed, "loader", own))
    return LoaderSeeds(generator, seed_worker)


def seed_worker(worker_id: int) -> None:
    """Seed Python's and NumPy's generators in a DataLoader worker from torch's, which the DataLoader has seeded.

    torch's seed in a worker differs by rank (through the generator), epoch and worker.
    """
    del worker_id  # torch.initial_seed() counts it in
    key = torch.initial_seed()
    random.seed(key)
    if find_spec("numpy") is not None:
        import_module("numpy").random.seed(key & 0xFFFFFFFF)
