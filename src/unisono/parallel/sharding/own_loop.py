"""Shards in a loop of your own: `shard`, which divides a model. It returns the handle of `loop_handle`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from unisono.collectives.construction import construct_on_all
from unisono.collectives.group import known_group
from unisono.collectives.world import World
from unisono.engine.description import check_equal_documents
from unisono.job.user_function import refuse_inside
from unisono.parallel.sharding.loop_handle import Sharded
from unisono.parallel.sharding.loop_setup import LoopArguments, check_loop, describe_loop, equalize
from unisono.parallel.sharding.shard import Shard

__all__ = ["shard"]


def shard(
    model: nn.Module,
    optimizer: Optimizer | Mapping[str, Optimizer],
    *,
    parallel: Shard | None = None,
    scaler: GradScaler | None = None,
) -> Sharded:
    """Divide a model, its gradients and its optimizer's state over all ranks, in a loop of your own.

    Every rank must call it, with the same model and optimizer; it begins the job, as `build` does. The weights and
    buffers of all ranks are set to those of rank 0, unless `build` made the model, which has compared them. From then
    on each rank keeps its part alone. With one process nothing is divided, and the handle works in the same way.

    Memory and traffic: as with a Trainer of one share for each rank; see `Shard`.

    Args:
        model: The model, on the device where this rank computes. A `Trainer` or another `shard` must not have it.
        optimizer: Its optimizer, which treats each element of a parameter alone. It may have state, equal on all ranks.
            Several are given as a dict by name, without a parameter in common; a step updates all of them or one.
        parallel: How to divide. None: as the model was built by `build`; for another model, `Shard()`.
        scaler: Scales losses, so that small float16 gradients do not vanish: torch.amp.GradScaler("cuda"),
            or "cpu" for a model there. Its methods are called where they are needed.

    Returns:
        The handle with which the loop trains.

    Raises:
        TypeError: An argument has the wrong type, or the model is wrapped by another library.
        ValueError: The model or the optimizer cannot be divided so; the message says why and what to do.
        RankMismatchError: Models, optimizers or arguments differ between ranks. Raised on all ranks.
        PeerError: Another rank raised a TypeError or ValueError, has died or does not come in time.
    """
    refuse_inside("unisono.parallel.shard")
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    world = World.connect(torch.device("cpu") if first is None else first.device)

    def check() -> LoopArguments:
        return check_loop(model, optimizer, parallel, scaler, ranks=world.size)

    if world.group is None:
        arguments = check()
    else:
        arguments, _ = construct_on_all(known_group(world.group), "unisono.parallel.shard", check, lambda _: None)
    check_equal_documents(world, describe_loop(arguments, model), given_to="unisono.parallel.shard")
    equalize(world, model, arguments.optimizers.values())
    return Sharded(model, arguments, world)
