"""How often workers bring their weights together, and how: `LocalSGD` and `DiLoCo`. Pure; does not import torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unisono.arguments import real, whole
from unisono.plan.shares import rank_block

__all__ = ["DiLoCo", "LocalSGD", "workers_of"]


@dataclass(frozen=True, kw_only=True)
class LocalSGD:
    """Workers train on their own, and their weights become the mean of all after every so many steps.

    Pass it to `Trainer(sync=...)`. A worker is a fixed number of virtual ranks, so the number of ranks changes no bit.
    After Stich, "Local SGD Converges Fast and Communicates Little" (2019), and Lin et al., "Don't Use Large
    Mini-Batches, Use Local SGD" (2018).

    Args:
        every: The number of steps in a round.
        workers: The number of workers, by which virtual_ranks is divisible, and the largest number of ranks. None: as
            many as virtual ranks. It decides the result.

    Raises:
        TypeError, ValueError: An argument is no whole number, or below 1.
    """

    every: int
    """The number of steps in a round."""
    workers: int | None = None
    """The number of workers; None for the number of virtual ranks."""

    def __post_init__(self) -> None:
        whole("every", self.every, least=1, meant="a whole number of steps, such as 50")
        if self.workers is not None:
            whole("workers", self.workers, least=1)

    @property
    def rule(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer step."""
        return 1.0, 0.0


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """Workers train on their own, and an outer optimizer applies the mean of their changes after every so many steps.

    The outer optimizer is SGD with Nesterov momentum over the difference between the weights at the start of a round
    and the mean of the workers' weights at its end. After Douillard et al., "DiLoCo: Distributed Low-Communication
    Training of Language Models" (2023), algorithm 1.

    Args:
        every: The number of steps in a round; the paper has 500.
        workers: See `LocalSGD`.
        outer_lr: The learning rate of the outer step.
        outer_momentum: Its momentum. 0: none.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of range.
    """

    outer_lr: float = 0.7
    """The learning rate of the outer step."""
    outer_momentum: float = 0.9
    """Its Nesterov momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (real("outer_lr", self.outer_lr) > 0 and math.isfinite(self.outer_lr)):
            raise ValueError(f"outer_lr={self.outer_lr} must be positive and finite; the paper has 0.7")
        if not 0 <= real("outer_momentum", self.outer_momentum) < 1:
            raise ValueError(f"outer_momentum={self.outer_momentum} must be at least 0 and below 1; the paper has 0.9")

    @property
    def rule(self) -> tuple[float, float]:
        """Learning rate and momentum of the outer step."""
        return float(self.outer_lr), float(self.outer_momentum)


def workers_of(rank: int, *, world_size: int, virtual_ranks: int, workers: int) -> range:
    """Return the workers of a rank.

    Raises:
        ValueError: A worker's virtual ranks would be on two ranks.

    >>> [workers_of(r, world_size=3, virtual_ranks=8, workers=8) for r in range(3)]
    [range(0, 2), range(2, 5), range(5, 8)]
    >>> workers_of(1, world_size=2, virtual_ranks=8, workers=4)
    range(2, 4)
    """
    each = virtual_ranks // workers
    for other in range(world_size):
        block = rank_block(other, world_size=world_size, virtual_ranks=virtual_ranks)
        own = rank_block(other, world_size=world_size, virtual_ranks=workers) if world_size <= workers else range(0)
        if (block.start, block.stop) != (own.start * each, own.stop * each):
            fitting = [n for n in range(1, workers + 1) if workers % n == 0]
            raise ValueError(
                f"{world_size} ranks cannot share {workers} workers of {each} virtual ranks: rank {other} would have "
                f"virtual ranks {block.start} to {block.stop - 1}, and a worker is on one rank. Start "
                f"{' or '.join(map(str, fitting))} ranks; workers={virtual_ranks} allows every number up to "
                f"{virtual_ranks}, with another result"
            )
    return rank_block(rank, world_size=world_size, virtual_ranks=workers)
