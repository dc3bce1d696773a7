"""What a run must be like for its model to be cut over ranks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.parallel.pipeline import Pipeline
from unisono.parallel.pipeline.blocks import find_blocks
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.trainer.closure import needs_closure

__all__ = ["check_cut_optimizers", "cut_model"]


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
        ValueError: There are several models, the model is compiled as a whole, the ranks cannot be divided so, or a
            name is not that of a submodule.
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
    find_blocks(model, pipeline.names or ())
    return CutModel(pipeline, model, world) if world.size > 1 else None
