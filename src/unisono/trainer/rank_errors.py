"""Errors of work that rank 0 does for all: every rank raises one, so that none goes on or waits."""

from __future__ import annotations

from unisono.collectives.world import World
from unisono.errors import CheckpointError

__all__ = ["raise_on_all"]


def raise_on_all(world: World, error: Exception | None, call: str) -> None:
    """Raise the error of a rank on all ranks; do nothing if there is none. Every rank must call it.

    Args:
        world: The ranks.
        error: What this rank's work has raised. It is raised here once the others know.
        call: The purpose of the call, for messages.

    Raises:
        CheckpointError: Another rank has failed; the message has its rank and error.
    """
    told = None if error is None else str(error)
    if error is not None and not isinstance(error, CheckpointError):
        told = f"{type(error).__name__}: {error}"
    everyone = world.gather(told, call)
    if error is not None:
        raise error
    for rank, what in enumerate(everyone):
        if what is not None:
            raise CheckpointError(f"rank {rank}: {what}")
