"""Brings the parts of a divided run together, where its state is to be saved or to be looked at as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.sharded import Division, OptimizerShards
from unisono.state.codec import decode, encode
from unisono.state.tensor_groups import TensorGroups, broadcast_groups

__all__ = ["gather_state"]


def gather_state(world: World, division: Division, optimizers: Iterable[Optimizer], *, everywhere: bool) -> None:
    """Bring weights and optimizer state to rank 0, or to all ranks. Every rank must call it.

    Memory: the state, where it is wanted, and another rank's part of it. Traffic: each rank's weights to the ranks that
    want them, and its optimizer state to all others.

    Args:
        world: The ranks.
        division: The state of the run on this rank.
        optimizers: The optimizers, in the same order on all ranks.
        everywhere: True to bring it to all ranks.
    """
    if division.whole == "everywhere" or (division.whole == "main" and not everywhere):
        return
    division.join_weights(everywhere=everywhere)
    wanted = everywhere or world.rank == 0
    for optimizer in optimizers:
        shards = division.shards_of(optimizer)
        shards.clear()

        def capture(shards: OptimizerShards = shards) -> tuple[dict[str, Any], TensorGroups]:
            document, tensors = encode(shards.own_state())
            return {"state": document}, {"state": tensors}

        for rank in range(world.size):
            document, groups = broadcast_groups(world, capture, source=rank, wanted=wanted)
            if wanted:
                shards.show(decode(document["state"], groups.get("state", {})))
    division.note_whole("everywhere" if everywhere else "main")
