"""Seeds for your own loop: all generators of a process, and those of DataLoader workers.

A Trainer needs none of this: it sets the generators from the plan.
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
    """The seed arguments of a torch DataLoader: `DataLoader(..., generator=..., worker_init_fn=...)`."""

    generator: torch.Generator
    """Seeded differently on every rank, also with same=True: workers of different ranks must not draw equal numbers."""
    worker_init_fn: Callable[[int], None]
    """Seeds Python's and NumPy's generators in a worker."""


def seed_everything(seed: int, *, same: bool = False) -> LoaderSeeds:
    """Seed torch (all devices), Python and NumPy in this process, differently on every rank.

    With equal random numbers, ranks would use the same dropout masks and augmentations. No communication.

    Args:
        seed: Seed of the run.
        same: Seed all ranks equally, for building a model that must be equal everywhere.

    Returns:
        Generator and worker_init_fn for a torch DataLoader, always different on every rank.

    Raises:
        TypeError: The seed is not a whole number.
        ValueError: A variable that the launcher set is invalid.
    """
    seed = whole("seed", seed)
    own = rank()
    if find_spec("numpy") is not None:
        import_module("numpy")  # if it were imported later, its generator would not be seeded
    key = derive_key(seed, "job") if same else derive_key(seed, "rank", own)
    set_generators(key)
    torch.manual_seed(key)  # every device
    generator = torch.Generator().manual_seed(derive_key(seed, "loader", own))
    return LoaderSeeds(generator, seed_worker)


def seed_worker(worker_id: int) -> None:
    """Seed Python's and NumPy's generators in a DataLoader worker from torch's, which the DataLoader has seeded.

    torch's seed in a worker differs by rank (through the generator), epoch and worker.
    """
    del worker_id  # included in torch.initial_seed()
    key = torch.initial_seed()
    random.seed(key)
    if find_spec("numpy") is not None:
        import_module("numpy").random.seed(key & 0xFFFFFFFF)
