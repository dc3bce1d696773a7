"""What every part of a trainer needs to know of its run: the plan's numbers, the ranks and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unisono.collectives.world import World
from unisono.plan import derive_key, rank_block
from unisono.state.random import set_generators

__all__ = ["RunContext"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContext:
    """The constants of one run on one rank."""

    seed: int
    """Root of all random numbers."""
    virtual_ranks: int
    """Shares of every global batch, fixed for the life of the run."""
    world: World
    """The real ranks, which may be others after a resume."""
    device: torch.device
    """Where this rank computes."""

    @property
    def block(self) -> range:
        """This rank's virtual ranks."""
        return rank_block(self.world.rank, world_size=self.world.size, virtual_ranks=self.virtual_ranks)

    def set_generators(self, stream: str, *coordinates: int) -> None:
        """Set all generators of this process, and of its device, for one point of one stream."""
        set_generators(derive_key(self.seed, stream, *coordinates), self.device)
