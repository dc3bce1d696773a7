"""The model of a run that is cut over the ranks of a pipeline: what runs it, and which stage has what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.staged import StageMap, StageOwnership, StageRanks
from unisono.errors import UnisonoError
from unisono.parallel.pipeline import Pipeline
from unisono.parallel.pipeline.blocks import find_blocks
from unisono.parallel.pipeline.mapping import map_stages
from unisono.parallel.pipeline.runner import PipelineRunner
from unisono.parallel.pipeline.stage_plan import PipelinePlan
from unisono.trainer.closure import needs_closure

__all__ = ["CutModel", "check_cut_optimizers", "cut_model"]


class CutModel:
    """A model over the ranks of a pipeline. Every rank has all of its modules, and the present values of its stages.

    Args:
        pipeline: The user's settings.
        model: The model.
        world: All ranks, more than one.

    Raises:
        ValueError: The ranks cannot be divided so.
    """

    def __init__(self, pipeline: Pipeline, model: nn.Module, world: World) -> None:
        size = pipeline.ranks_of_replica(world.size)
        self._pipeline, self._world, self.model = pipeline, world, model
        self.ranks = StageRanks.connect(world, stages=pipeline.num_stages, size=size)
        self.ownership = StageOwnership()
        self._runners: dict[int, PipelineRunner] = {}

    def runner(self, model: nn.Module) -> PipelineRunner:
        """Return what runs a model of this form: the model itself, or its average."""
        if id(model) not in self._runners:
            self._runners[id(model)] = PipelineRunner(
                model,
                starts=self._pipeline.stages,
                schedule=self._pipeline.schedule,
                group=self.ranks.pipeline.group,
            )
        return self._runners[id(model)]

    def plan(self, model: nn.Module, function: Callable[..., Any], inputs: Sequence[Any]) -> PipelinePlan:
        """Return the plan of a function for the inputs of a micro-batch.

        Raises:
            CutError: The model cannot be cut so.
            UnisonoError: A stage would need a parameter that it has not had in the first step.
        """
        plan = self.runner(model).plan(function, inputs)
        known = self.ownership.map
        if known is not None and (difference := known.difference(self._map(plan, model))):
            raise UnisonoError(
                f"the model's forward pass went another way than in the first step: {difference}. Begin stages with "
                "blocks that are called in the same order in training and in evaluation, and for all inputs."
            )
        return plan

    def settle(self, plan: PipelinePlan | None) -> None:
        """Agree on which stage has what, in the first step. Every rank must call it.

        Args:
            plan: The plan of a micro-batch; None on a rank that has none in this step.

        Raises:
            UnisonoError: Ranks have found different answers.
        """
        own = None if plan is None else self._map(plan, self.model)
        parts = None if own is None else (dict(own.parameters), dict(own.buffers))
        everyone = [StageMap(*each) for each in self._world.gather(parts, "trainer.step cutting the model") if each]
        for other in everyone[1:]:
            if difference := everyone[0].difference(other):
                raise UnisonoError(f"the ranks have cut the model differently: {difference}.")
        self.ownership.settle(everyone[0])

    def _map(self, plan: PipelinePlan, model: nn.Module) -> StageMap:
        return map_stages(plan, model, self._pipeline.stages)


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
    find_blocks(model, pipeline.stages)
    return CutModel(pipeline, model, world) if world.size > 1 else None
