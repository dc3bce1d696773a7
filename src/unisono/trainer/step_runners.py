"""What performs the steps of a run: engines, buffers and a `StepRunner` for each optimizer.

Which ones depends on the layout: each rank has the whole model, or it is cut into stages, or divided over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine import BufferTransaction, EngineFactory, JointOptimizer, select_engines
from unisono.engine.sharded import ShardedEngineFactory
from unisono.engine.staged import StagedBuffers, StagedEngineFactory
from unisono.engine.step_fingerprint import StepFingerprint
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.sharding.divided_model import DividedModel
from unisono.trainer.attribute_writes import AttributeWrites
from unisono.trainer.carried import CarriedStates
from unisono.trainer.loop_actions import LeftGradients
from unisono.trainer.pipeline_gradients import PipelineGradients
from unisono.trainer.recovery import Recovery
from unisono.trainer.run_context import RunContext
from unisono.trainer.settings import TrainerSettings
from unisono.trainer.sharded_gradients import ShardedGradients
from unisono.trainer.staged_state import make_staged_engines
from unisono.trainer.step import StepRunner
from unisono.trainer.step_gradients import StepGradients
from unisono.trainer.virtual_rank_gradients import VirtualRankGradients

__all__ = ["Engines", "engines_of_layout", "engines_of_run", "make_runners"]

Engines = EngineFactory | StagedEngineFactory | ShardedEngineFactory


def engines_of_run(
    settings: TrainerSettings,
    world: World,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer],
    recovery: Recovery,
) -> EngineFactory:
    """Return the factory of engines for a model that each rank has as a whole. Every rank must call it."""
    return select_engines(
        settings.engine if settings.parallel is None and settings.sync is None else "collective",
        world,
        modules.values(),
        optimizers.values(),
        virtual_ranks=settings.virtual_ranks,
        overlap=settings.overlap,
        protect=recovery.is_on,
    )


def engines_of_layout(
    engines: EngineFactory,
    settings: TrainerSettings,
    world: World,
    modules: Mapping[str, nn.Module],
    cut: CutModel | DividedModel | None,
) -> tuple[Engines, BufferTransaction | StagedBuffers]:
    """Return the factory of engines, and the buffers, of a model that may be cut or divided over ranks.

    Args:
        engines: What `engines_of_run` has returned.
        settings: The arguments of the Trainer.
        world: All ranks.
        modules: The models by the prefix of their names.
        cut: The model, if it is cut or divided.
    """
    virtual_ranks = settings.virtual_ranks
    if isinstance(cut, CutModel):
        staged = make_staged_engines(cut, engines, modules, virtual_ranks=virtual_ranks)
        return staged, StagedBuffers(
            modules,
            cut.ranks,
            cut.ownership,
            staged.all_reduce_of,
            virtual_ranks=virtual_ranks,
            parameters_move=cut.divisions is not None and cut.divisions.divides_weights,
        )
    if isinstance(cut, DividedModel):
        sharded = ShardedEngineFactory(
            world,
            list(modules.values()),
            cut.division,
            engines.comparison,
            virtual_ranks=virtual_ranks,
            overlap=settings.overlap,
            divides_sums=cut.divides_sums,
        )
        return sharded, BufferTransaction(
            modules,
            world,
            sharded.all_reduce,
            virtual_ranks=virtual_ranks,
            parameters_move=not cut.division.keeps_weights,
            in_turn=cut.divides_sums,
        )
    return engines, BufferTransaction(
        modules,
        world,
        engines.all_reduce,
        virtual_ranks=virtual_ranks,
        parameters_move=settings.sync is not None,
    )


def make_runners(
    run: RunContext,
    settings: TrainerSettings,
    optimizers: Mapping[str, Optimizer],
    *,
    model: nn.Module | Mapping[str, nn.Module],
    modules: Mapping[str, nn.Module],
    engines: Engines,
    buffers: BufferTransaction | StagedBuffers,
    carried: CarriedStates,
    cut: CutModel | DividedModel | None,
) -> dict[str | None, StepRunner]:
    """Return the runner of each optimizer by its name; where there are several, None is that of all together.

    Args:
        run: The facts of the run.
        settings: The arguments of the Trainer.
        optimizers: The optimizers by name.
        model: The model or models as users' functions get them.
        modules: The same by the prefix of their names.
        engines: Makes the engines.
        buffers: The buffers of the models.
        carried: The states that users' functions carry from batch to batch.
        cut: The model, if it is cut or divided.
    """

    attributes, left = AttributeWrites(modules), LeftGradients(optimizers.values())

    def make_runner(of_step: Mapping[str, Optimizer]) -> StepRunner:
        single = next(iter(of_step.values()))
        stepped = single if len(of_step) == 1 else JointOptimizer([*of_step.values()])
        gradients: StepGradients
        if isinstance(buffers, StagedBuffers):
            assert isinstance(cut, CutModel)
            gradients = PipelineGradients(
                run, models=model, modules=modules, buffers=buffers, autocast=settings.autocast, cut=cut
            )
        elif isinstance(cut, DividedModel):
            gradients = ShardedGradients(
                run,
                models=model,
                modules=modules,
                buffers=buffers,
                autocast=settings.autocast,
                carried=carried,
                divided=cut,
            )
        else:
            gradients = VirtualRankGradients(
                run, models=model, modules=modules, buffers=buffers, autocast=settings.autocast, carried=carried
            )
        return StepRunner(
            run,
            models=model,
            modules=modules,
            optimizer=stepped,
            engines=engines,
            buffers=buffers,
            gradients=gradients,
            fingerprint=StepFingerprint(of_step, modules),
            attributes=attributes,
            left=left,
            autocast=settings.autocast,
            clip_grad_norm=settings.clip_grad_norm,
        )

    runners: dict[str | None, StepRunner] = {name: make_runner({name: each}) for name, each in optimizers.items()}
    if len(optimizers) > 1:
        runners[None] = joint = make_runner(optimizers)
        joint.scaler = runners[next(iter(optimizers))].scaler
    return runners
