"""Gradients that a user's function has changed between their sum and the update: they must be equal on all ranks."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from unisono.collectives.rank_errors import gather_or_raise
from unisono.collectives.world import World
from unisono.engine import STEP_UNDONE, Trained
from unisono.errors import RankMismatchError

__all__ = ["check_gradients"]


def check_gradients(world: World, trained: Trained, error: Exception | None) -> None:
    """Compare the gradients that `on_gradients` left on each rank. Every rank must call it.

    Costs one pass over the gradient and one small exchange.

    Args:
        world: The ranks.
        trained: The parameters.
        error: The exception that the function raised on this rank, if any. It is raised here once the others know.

    Raises:
        PeerError: The function raised an error on another rank.
        RankMismatchError: Gradients differ, on all ranks.
    """
    own = [] if error is not None else [_checksum(p.grad) for p in trained.parameters]
    everyone = gather_or_raise(
        world, own, error, "trainer.step(on_gradients=...)", work="on_gradients", remedy=f". {STEP_UNDONE}"
    )
    for rank, found in enumerate(everyone):
        if found != everyone[0]:
            name = next(n for n, a, b in zip(trained.names, found, everyone[0], strict=True) if a != b)
            raise RankMismatchError(
                f"on_gradients made another gradient of {name!r} on rank {rank} than on rank 0. {STEP_UNDONE} Compute "
                "from p.grad, and from what is equal on all ranks; torch's generators are set equally on all ranks "
                "before the call."
            )


def _checksum(gradient: Tensor | None) -> int | None:
    """Return a 64-bit number that is equal for equal gradients, and almost certainly different for others."""
    if gradient is None:
        return None
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    digest = blake2b(_bytes_of(values), digest_size=8)
    if gradient.is_sparse:
        digest.update(_bytes_of(gradient.coalesce().indices()))
    return int.from_bytes(digest.digest(), "little")


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
