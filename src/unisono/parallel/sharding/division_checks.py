"""Conditions that a model and its optimizers must meet to be divided over ranks. Nothing here communicates."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from unisono.engine.shared import is_elementwise
from unisono.parallel.placed.forward import refuse_placed
from unisono.parallel.sharding.built_parts import built_parts
from unisono.parallel.sharding.divided_model import check_memory
from unisono.parallel.sharding.shard import Shard
from unisono.parallel.sharding.units import blocks_of, check_replicas

__all__ = ["check_divisible", "check_optimizers", "refuse_compiled"]


def refuse_compiled(caller: str) -> ValueError:
    """Return the error for a model that is compiled as a whole.

    Args:
        caller: What divides it, as the user writes it.
    """
    return ValueError(
        f"{caller} brings the parameters of blocks together when they are called, and torch.compile has made one "
        "program of the whole model: compile the blocks instead, such as model.layers[0].compile()"
    )


def check_divisible(
    shard: Shard, model: nn.Module, optimizers: Iterable[Optimizer], ranks: int, *, caller: str, argument: str
) -> None:
    """Check that a model and its optimizers can be divided over ranks.

    Args:
        shard: The user's settings.
        model: The model.
        optimizers: The optimizers that train it.
        ranks: The number of ranks, also 1: what cannot be divided is refused there, too.
        caller: What divides them, as the user writes it, for messages.
        argument: What to leave out so that nothing is divided, for messages.

    Raises:
        ValueError: An optimizer, or the memory of a parameter, cannot be divided, the model is placed, the ranks cannot
            be divided into replicas, or a name is not that of a block.
    """
    optimizers = [*optimizers]
    refuse_placed(model, f"{caller} divides the parameters of a model over ranks")
    check_optimizers(optimizers, argument=argument)
    if shard.offload:
        _check_on_cpu(optimizers)
    blocks_of(shard, model)
    if built_parts(model) is None:
        check_memory(model)
    check_replicas(shard, ranks)


def _check_on_cpu(optimizers: Iterable[Optimizer]) -> None:
    """Check that optimizers can update parameters in memory of the CPU.

    Raises:
        ValueError: There is one that cannot.
    """
    for optimizer in optimizers:
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise ValueError(
                f"{type(optimizer).__name__}(capturable=True) updates on a GPU alone, and with Shard(offload=True) "
                "parameters are updated in memory of the CPU: leave out capturable=True, and take fused=True, which is "
                "fast there"
            )


def check_optimizers(optimizers: Iterable[Optimizer], *, argument: str) -> None:
    """Check that the state of optimizers can be divided over ranks.

    Raises:
        ValueError: There is one that cannot.
    """
    for optimizer in optimizers:
        if not is_elementwise(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be divided over ranks: it is not known to treat each element of a "
                "parameter alone. Those of torch that do are SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, "
                "Adadelta, RMSprop, Rprop and ASGD themselves, not classes made from them. Take one of these, or leave "
                f"out {argument}"
            )
