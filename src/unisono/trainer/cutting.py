"""Conditions that a run must meet for its model to be cut or divided over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.model_contents import plain_name
from unisono.engine.staged import StageDivisions
from unisono.parallel.pipeline import Pipeline
from unisono.parallel.pipeline.blocks import find_blocks
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.placed.forward import refuse_placed
from unisono.parallel.sharding import Shard
from unisono.parallel.sharding.built_parts import built_parts
from unisono.parallel.sharding.divided_model import DividedModel, check_memory
from unisono.parallel.sharding.division_checks import check_divisible, check_optimizers, refuse_compiled
from unisono.parallel.sharding.units import is_divided
from unisono.trainer.closure import needs_closure

__all__ = ["built_tensors", "check_built", "check_cut_optimizers", "cut_model", "divide_model"]


def check_built(modules: Mapping[str, nn.Module], parallel: Pipeline | Shard | None, device: torch.device) -> None:
    """Check that models which were built in parts go on in the same parts, on the same device.

    Args:
        modules: The models by the prefix of their names.
        parallel: The user's settings.
        device: Where they are to compute.

    Raises:
        ValueError: The model was built with other settings, or changed since.
    """
    for module in modules.values():
        built = built_parts(module)
        if built is None:
            continue
        if parallel != built.shard:
            raise ValueError(
                f"the model was built by unisono.parallel.build(..., parallel={built.shard}), so each rank has the "
                f"part of it that this needs, and Trainer was given parallel={parallel}: give both the same"
            )
        if device != built.device:
            raise ValueError(
                f"the model was built by unisono.parallel.build for {built.device}, where each rank's part of it is, "
                f'and Trainer is to train on {device}: give both the same, such as device="{device}"'
            )
        built.check_unchanged(module)


def built_tensors(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of parameters of which each rank has a part, since `unisono.parallel.build` has made them.

    It has compared their values over ranks. A tied parameter has several names.
    """
    return {
        prefix + plain_name(name)
        for prefix, module in modules.items()
        if built_parts(module) is not None
        for name, _ in module.named_parameters(remove_duplicate=False)
    }


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


def cut_model(
    pipeline: Pipeline,
    modules: Mapping[str, nn.Module],
    given: object,
    optimizers: Mapping[str, Optimizer],
    world: World,
) -> CutModel | None:
    """Return the model of a run as it is cut; None with one rank, which has all of it. Every rank must call it.

    Args:
        pipeline: The user's settings.
        modules: The models by the prefix of their names.
        given: The model as the user has given it.
        optimizers: The optimizers by name.
        world: All ranks.

    Raises:
        ValueError: There are several models, the model is placed, or compiled as a whole, the ranks cannot be divided
            so, a name is not that of a submodule, or the state of an optimizer cannot be divided with zero=1 or 3.
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
    if pipeline.zero is not None:
        check_optimizers(optimizers.values(), argument=f"zero={pipeline.zero}")
        check_memory(model, f"Pipeline(zero={pipeline.zero})")
    if world.size == 1:
        return None
    cut = CutModel(pipeline, model, world)
    if pipeline.zero is not None and cut.ranks.replicas > 1:
        cut.divisions = StageDivisions(
            cut.ranks, cut.ownership, model, [*optimizers.values()], divides_weights=pipeline.zero == 3
        )
    return cut


def divide_model(
    shard: Shard,
    modules: Mapping[str, nn.Module],
    given: object,
    optimizers: Mapping[str, Optimizer],
    *,
    world: World,
    device: torch.device,
) -> DividedModel | None:
    """Return the model of a run as it is divided over ranks; None if one rank has all of it.

    Every rank must call it.

    Args:
        shard: The user's settings.
        modules: The models by the prefix of their names.
        given: The model as the user has given it.
        optimizers: The optimizers by name.
        world: All ranks.
        device: Where the model computes.

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
        raise refuse_compiled("parallel=Shard(...)")
    check_divisible(shard, model, optimizers.values(), world.size, caller="parallel=Shard(...)", argument="parallel=")
    if not is_divided(shard, device, ranks=world.size):
        return None
    return DividedModel(shard, model, [*optimizers.values()], world, device)
