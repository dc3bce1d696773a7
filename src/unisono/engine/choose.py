"""Which engine serves a run."""

from __future__ import annotations

from unisono.comm import World
from unisono.engine.base import Engine
from unisono.engine.collective import CollectiveEngine
from unisono.engine.local import LocalEngine

__all__ = ["choose_engine"]


def choose_engine(world: World, *, virtual_ranks: int, overlap: bool) -> Engine:
    """Give the engine of a world: with one rank sums stay local, else they travel while backward runs.

    Args: overlap=False lets nothing travel before backward has ended.
    """
    if world.group is None:
        return LocalEngine()
    return CollectiveEngine(world, virtual_ranks=virtual_ranks, overlap=overlap)
