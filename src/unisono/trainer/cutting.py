"""What a run must be like for its model to be cut or divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.shared import is_elementwise
from unisono.parallel.pipeline import Pipeline
from unisono.parallel.pipeline.blocks import find_blocks
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.placed.forward import refuse_placed
from unisono.parallel.sharding import Shard
from unisono.parallel.sharding.divided_model import DividedModel, blocks_of, check_memory
from unisono.trainer.closure import needs_closure

__all__ = ["check_cut_optimizers", "cut_model", "divide_model"]


def check_cut_optimizers(optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse optimizers that need the whole model.

    Raises:
        ValueError: There is one.
    """
    for optimizer in optimizers.values():
        if needs_closure(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} computes the loss of the whole model at other weights within a step, and "
                "parallel= cuts the model over ranks: take another optimizer, or leave out parallel="
            )


def cut_model(pipeline: Pipeline, modules: Mapping[str, nn.Module], given: object, world: World) -> CutModel | None:
    """Return the model of a run as it is cut; None with one rank, which has all of it. Every rank must call it.

    Args:
        pipeline: The user's settings.
        modules: The models by the prefix of their names.
        given: The model as the user has given it.
        world: All ranks.

    Raises:
        ValueError: There are several models, the model is placed, or compiled as a whole, the ranks cannot be divided
            so, or a name is not that of a submodule.
    """
    if len(modules) > 1:
        names = ", ".join(repr(name.removesuffix(".")) for name in modules)
        raise ValueError(
            f"parallel=Pipeline(...) cuts one model, and there are {len(modules)}: {names}. Join them in one "
            "nn.Module, or leave out parallel="
        )
    (model,) = modules.values()
    if model is not given:
        raise ValueError(
            "parallel=Pipeline(...) runs the model's own forward pass with some of its modules on other ranks, and "
            "torch.compile has made one program of it: compile the modules within a stage instead, such as "
            "model.layers[0].compile()"
        )
    refuse_placed(model, "parallel=Pipeline(...) runs a model with one stage on each rank")
    find_blocks(model, pipeline.names or ())
    return CutModel(pipeline, model, world) if world.size > 1 else None


def divide_model(
    shard: Shard, modules: Mapping[str, nn.Module], given: object, optimizers: Mapping[str, Optimizer], world: World
) -> DividedModel | None:
    """Return the model of a run as it is divided over ranks; None with one rank, which has all of it.

    Every rank must call it.

    Args:
        shard: The user's settings.
        modules: The models by the prefix of their names.
        given: The model as the user has given it.
        optimizers: The optimizers by name.
        world: All ranks.

    Raises:
        ValueError: There are several models, the model is compiled as a whole, an optimizer, or the memory of a
            parameter, cannot be divided, or a name is not that of a block.
    """
    if len(modules) > 1:
        names = ", ".join(repr(name.removesuffix(".")) for name in modules)
        raise ValueError(
            f"parallel=Shard(...) divides one model, and there are {len(modules)}: {names}. Join them in one "
            "nn.Module, or leave out parallel="
        )
    (model,) = modules.values()
    if model is not given:
        raise ValueError(
            "parallel=Shard(...) brings the parameters of blocks together when they are called, and torch.compile has "
            "made one program of the whole model: compile the blocks instead, such as model.layers[0].compile()"
        )
    refuse_placed(model, "parallel=Shard(...) divides the parameters of a model over ranks")
    for optimizer in optimizers.values():
        if not is_elementwise(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} cannot be divided over ranks: it is not known to treat each element of a "
                "parameter alone. Those of torch that do are SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, "
                "Adadelta, RMSprop, Rprop and ASGD themselves, not classes made from them. Take one of these, or leave "
                "out parallel="
            )
    blocks_of(shard, model)
    check_memory(model)
    if world.size > 1 and world.size % shard.replicas:
        nearest = world.size // shard.replicas * shard.replicas
        fewer = f"{nearest} or " if nearest else ""
        raise ValueError(
            f"replicas={shard.replicas} cannot share {world.size} ranks evenly: start "
            f"{fewer}{nearest + shard.replicas}, or leave out replicas="
        )
    return DividedModel(shard, model, [*optimizers.values()], world) if world.size > 1 else None
