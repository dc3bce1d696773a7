"""The construction of the parts of a Trainer: ranks, engine, steps, and the state of a run that is resumed.

Nothing here is called after the start of a run. Start reading at `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial

import torch
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.embedding.tables import tables_in
from unisono.engine import BufferTransaction, EngineFactory, share_files
from unisono.engine.description import (
    check_equal_documents,
    describe_models,
    describe_optimizers,
    describe_schedulers,
    describe_system,
    plain,
)
from unisono.engine.local_steps import Workers
from unisono.engine.model_contents import parameter_names
from unisono.engine.optimizer_placement import follow_parameters
from unisono.engine.staged import StagedBuffers, StagedEngineFactory
from unisono.job.placement import own_placement
from unisono.job.ranks import local_world_size
from unisono.parallel.device_names import choose_device
from unisono.parallel.pipeline import Pipeline
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.sharding import Shard
from unisono.parallel.sharding.divided_model import DividedModel
from unisono.state.stateful import Stateful
from unisono.trainer.averages import AverageUpdates, DividedAverage, start_averages
from unisono.trainer.carried import Carried, CarriedStates
from unisono.trainer.checkpointing import Checkpointing
from unisono.trainer.cutting import built_tensors, check_built, check_cut_optimizers, cut_model, divide_model
from unisono.trainer.divided_table_state import DividedTableState
from unisono.trainer.evaluation_history import EvaluationHistory
from unisono.trainer.hyperparameters import given_by, settings_of
from unisono.trainer.model_checks import check_models, check_placed
from unisono.trainer.modules import check_batch_norms, check_embeddings, plain_modules
from unisono.trainer.part_restoration import restore_parts
from unisono.trainer.recoverable_state import RecoverableState, WholeState
from unisono.trainer.recovery import Recovery
from unisono.trainer.restoration import restore
from unisono.trainer.resume import ResumedRun
from unisono.trainer.row_division import ROWS_LOST, divide_tables, has_divided
from unisono.trainer.run_context import RunContext
from unisono.trainer.settings import TrainerSettings
from unisono.trainer.setup import (
    check_constants,
    check_equal_values,
    check_schedulers,
    check_workers,
    compile_each_size,
    keep_freed_memory,
    named_optimizers,
)
from unisono.trainer.shard_gathering import ShardGathering
from unisono.trainer.snapshot import Cursor, Subjects, check_storable_models
from unisono.trainer.stage_commits import StageCommits
from unisono.trainer.stage_gathering import StageGathering
from unisono.trainer.stage_restoration import restore_stages
from unisono.trainer.stage_state import StageState
from unisono.trainer.staged_state import StagedState
from unisono.trainer.step_clock import StepClock
from unisono.trainer.step_runners import engines_of_layout, engines_of_run, make_runners
from unisono.trainer.table_optimizers import refuse_averages, refuse_tables, tensors_in_files, with_tables
from unisono.trainer.table_restoration import restore_tables
from unisono.trainer.trainer_parts import Gathering, TrainedModels, TrainerParts
from unisono.trainer.worker_gathering import SYNC_GROUP, WorkerGathering, owner_of

__all__ = ["assemble"]

_NO_OTHER_PART = "with Pipeline(zero={}), the part of {} of a rank that dies is nowhere else"
_NO_COPIES = (
    "a model that is cut over ranks dies with the rank that has a part of it, unless all ranks are on one host and "
    "compute on CPUs: then they keep the parts for each other in shared memory"
)


def assemble(  # noqa: PLR0912, PLR0915  one thing after the other
    model: TrainedModels,
    optimizer: Optimizer | Mapping[str, Optimizer],
    settings: TrainerSettings,
    *,
    recovery: Recovery,
) -> TrainerParts:
    """Join the ranks, move the models to their device, and put all parts into the state in which the run begins.

    Every rank must call it with equal arguments. `Trainer` describes the arguments and the errors.

    Args:
        model: See `Trainer`.
        optimizer: See `Trainer`.
        settings: The other arguments.
        recovery: Has the place of the other ranks, on a new rank, which is alone until it joins them.
    """
    check_models(model)
    modules = plain_modules(model)
    check_batch_norms(modules)
    refuse_averages(modules, settings.ema_decay)
    if settings.parallel is not None:
        refuse_tables(modules, f"parallel={type(settings.parallel).__name__}(...)")
    optimizers = with_tables(named_optimizers(optimizer), modules)
    schedulers = check_schedulers(settings.scheduler, optimizers, settings.stateful)
    chosen = choose_device(settings.device, modules.values(), local_rank=own_placement().local_rank)
    check_built(modules, settings.parallel, chosen)
    check_placed(modules, chosen)
    offloads = isinstance(settings.parallel, Shard) and settings.parallel.offloads(chosen)
    if chosen.type == "cpu" or offloads or any(table.stays_on_cpu for table in tables_in(modules.values()).values()):
        torch.set_num_threads(settings.threads)
    if chosen.type == "cpu":
        keep_freed_memory()
    compile_each_size()
    for module in modules.values():
        module.to(chosen)
    follow_parameters(optimizers.values())
    world = World.connect(chosen)
    # Before any other collective: it might never end if ranks differ.
    check_equal_documents(
        world,
        {
            "seed": settings.seed,
            "virtual_ranks": settings.virtual_ranks,
            "directory": None if settings.directory is None else str(settings.directory),
            "resume": settings.resume,
            **{f"checkpoints.{name}": plain(value) for name, value in asdict(settings.checkpoints).items()},
            "scheduler_interval": settings.scheduler_interval,
            "clip_grad_norm": plain(settings.clip_grad_norm),
            "autocast": settings.autocast,
            "ema_decay": plain(settings.ema_decay),
            "the names of stateful": list(settings.stateful),
            **{
                f"reset_each_epoch of stateful[{name!r}]": each.reset_each_epoch
                for name, each in settings.stateful.items()
                if isinstance(each, Carried)
            },
            "the type of the device": chosen.type,
            "threads": settings.threads,
            "overlap": settings.overlap,
            "engine": settings.engine,
            "digest_every": settings.digest_every,
            "sync": repr(settings.sync),
            "parallel": repr(settings.parallel),
            **describe_models(modules),
            **describe_optimizers(optimizers, parameter_names(modules)),
            **describe_schedulers(schedulers),
            **describe_system(),
        },
    )
    if settings.directory is not None:
        check_storable_models(modules)
    cut: CutModel | DividedModel | None = None
    if isinstance(settings.parallel, Pipeline):
        check_cut_optimizers(optimizers)
        cut = cut_model(settings.parallel, modules, model, optimizers, world)
    elif settings.parallel is not None:
        cut = divide_model(settings.parallel, modules, model, optimizers, world=world, device=chosen)
    policy = settings.checkpoints
    if policy.incremental is None:
        policy = replace(policy, incremental=bool(tables_in(modules.values())))
    share_files(world, modules.values(), optimizers.values(), divided=settings.engine == "collective")
    position = recovery.position
    base = engines_of_run(settings, world, modules, optimizers, recovery) if has_divided(modules) else None
    divided = None if base is None else divide_tables(world, modules, optimizers, base, settings, position=position)
    in_files = tensors_in_files(modules, optimizers)
    keeper = Checkpointing(settings.directory, policy, world, in_files, loses_ranks=recovery.decisions.loses_ranks)
    workers = None
    if settings.sync is not None:
        single = check_workers(settings.sync, modules, optimizers, named_optimizers(optimizer))
        workers = Workers(settings.sync, single, world, virtual_ranks=settings.virtual_ranks)
    found: ResumedRun | None = None
    if position is None:
        owner = None if workers is None else partial(owner_of, workers)
        found = keeper.find(
            settings.resume,
            in_parts=isinstance(cut, DividedModel) or divided is not None or _reads_stages(cut, world, recovery),
            by_main=divided is not None,
            owner=owner,
        )
    source = None if found is None else found.source
    facts = None if found is None or source is None else found.document["facts"]
    check_constants(
        settings.virtual_ranks,
        seed=settings.seed,
        replicas=cut.ranks.replicas if isinstance(cut, CutModel) else world.size,
        facts=facts,
        directory=settings.directory,
    )
    check_embeddings(modules, virtual_ranks=settings.virtual_ranks)
    run = RunContext(
        seed=settings.seed,
        virtual_ranks=settings.virtual_ranks,
        world=world,
        device=chosen,
        note=recovery.note,
        noting=recovery.noting,
        is_cut=isinstance(settings.parallel, Pipeline),
        is_divided=isinstance(settings.parallel, Shard),
        in_turn=isinstance(cut, DividedModel) and cut.divides_sums,
        ranks_of_replica=cut.ranks.size if isinstance(cut, CutModel) else 1,
        resizing=recovery,
        saving=keeper.announcement,
        clock=StepClock(chosen),
        exchange=None if divided is None else divided.exchange,
    )

    def select() -> EngineFactory:
        if divided is None:
            return engines_of_run(settings, world, modules, optimizers, recovery)
        # Ranks of a lost host may have come to that of the others: what is divided stays so.
        made = engines_of_run(replace(settings, engine="collective"), world, modules, optimizers, recovery)
        made.exchange = divided.exchange
        return made

    base = base or select()
    if divided is not None:
        base.exchange, divided.tensors.call = divided.exchange, recovery.call
        if not divided.exchange.shift:
            recovery.refuse(ROWS_LOST)
    if in_files and world.group is not None and not base.shares:
        raise ValueError(
            f"{next(iter(in_files))[1]!r} is a table with directory=, whose file ranks share, and these share no "
            f'weights (engine="{settings.engine}"). Make the tables with divided=True, or give CPU ranks of one host '
            'engine="auto", or leave directory= out.'
        )
    base.workers = workers
    carried = CarriedStates({name: each for name, each in settings.stateful.items() if isinstance(each, Carried)}, run)
    engines, buffers = engines_of_layout(base, settings, world, modules, cut)

    runners = make_runners(
        run,
        settings,
        optimizers,
        model=model,
        modules=modules,
        engines=engines,
        buffers=buffers,
        carried=carried,
        cut=cut,
    )
    averages = start_averages(modules, settings.ema_decay)
    divided_average: DividedAverage | None = None
    if isinstance(cut, DividedModel) and averages and not cut.division.keeps_weights:
        (average,) = averages.values()
        divided_average = DividedAverage(cut, average.module)
    others: dict[str, Stateful] = {f"stateful/{name}": each for name, each in settings.stateful.items()}
    others |= {f"scheduler/{name}": each for name, each in schedulers.items()}
    others |= {
        f"scaler/{name}": runner.scaler for name, runner in runners.items() if name is not None and runner.scaler
    }
    others |= {f"average/{prefix}": AverageUpdates(average) for prefix, average in averages.items()}
    subjects = Subjects(
        modules=modules,
        optimizers=optimizers,
        averages={prefix: average.module for prefix, average in averages.items()},
        others=others,
        buffers=buffers,
    )
    of_workers = None if workers is None else WorkerGathering(world, workers, subjects)
    if of_workers is not None:
        others["sync"] = of_workers
        of_workers.found = {} if found is None else found.groups.get(SYNC_GROUP, {})
    if isinstance(cut, CutModel):
        cut.has_beside(subjects.averages.values(), subjects.optimizers.values())
    cursor, history = Cursor(), EvaluationHistory()
    warnings = [] if found is None else found.warnings
    given = given_by(settings_of(optimizers, others))
    if position is not None:
        cursor, history = position.cursor, EvaluationHistory.restored(position.evaluations)
    elif found is None or source is None:
        check_equal_values(
            world,
            modules,
            optimizers,
            compared=built_tensors(modules)
            | {name for group, name in in_files if group == "model"}
            | (set() if divided is None else divided.names),
        )
    else:
        if divided is not None:
            given, overruled = restore_tables(world, subjects, divided, found)
        elif found.checkpoint is None:
            if isinstance(cut, DividedModel):
                cut.division.become_whole()
            given, overruled = restore(subjects, found.groups, found.document, source=source)
            if of_workers is not None:
                of_workers.note_restored()
        elif isinstance(cut, CutModel):
            given, overruled = restore_stages(world, subjects, cut, found.checkpoint, found.document)
        else:
            assert isinstance(cut, DividedModel)
            given, overruled = restore_parts(world, subjects, cut.division, found.checkpoint, found.document)
        cursor, history = Cursor(**found.document["facts"]["cursor"]), _history_of(found, settings.checkpoints.best)
        if overruled:
            warnings.append(
                f"these settings come from the checkpoint: {'; '.join(overruled)}. To change them in a run that goes "
                "on, write to optimizer.param_groups after the Trainer has been made."
            )
    gathering: Gathering | None = divided or of_workers
    subjects = replace(subjects, given=given, put_whole=None if of_workers is None else of_workers.put_whole)
    if divided is not None:
        divided.begin(subjects)
    state: RecoverableState
    if isinstance(cut, CutModel):
        assert isinstance(buffers, StagedBuffers)
        assert isinstance(engines, StagedEngineFactory)
        commits = StageCommits(
            world, cut, StageState(cut, subjects, buffers), is_on=lambda: recovery.is_on, refuse=recovery.refuse
        )
        cut.before_release = commits.commit_base
        gathering = StageGathering(world, cut, subjects, buffers, commits)
        state = StagedState(
            run,
            select=select,
            engines=engines,
            cut=cut,
            subjects=subjects,
            buffers=buffers,
            runners=runners,
            gathering=gathering,
            commits=commits,
        )
        if recovery.is_joined and cut.divisions is not None:
            parts = (3, "the stage") if cut.divisions.divides_weights else (1, "the optimizer's state")
            recovery.refuse(_NO_OTHER_PART.format(*parts))
        elif recovery.is_joined:
            commits.connect(base.runtime)
            if base.runtime is None or chosen.type != "cpu":
                recovery.refuse(_NO_COPIES)
    else:
        assert isinstance(buffers, BufferTransaction)
        assert not isinstance(engines, StagedEngineFactory)
        if cut is not None:
            gathering = ShardGathering(world, cut.division, subjects)
        elif gathering is None and not in_files and not policy.incremental:
            keeper.hosts.divide(subjects)
        make: Callable[..., WholeState] = WholeState
        if divided is not None and divided.exchange.shift:
            is_new = position is not None
            make = partial(DividedTableState, tables=divided, announcement=keeper.announcement, is_new=is_new)
        state = make(run, select=select, engines=engines, subjects=subjects, buffers=buffers, runners=runners)
    if position is None:
        keeper.meet()
    return TrainerParts(
        run=run,
        settings=settings,
        recovery=recovery,
        state=state,
        carried=carried,
        cut=cut,
        gathering=gathering,
        keeper=keeper,
        modules=modules,
        runners=runners,
        schedulers=schedulers,
        averages=averages,
        divided_average=divided_average,
        subjects=subjects,
        cursor=cursor,
        history=history,
        source=source,
        warnings=warnings,
    )


def _reads_stages(cut: CutModel | DividedModel | None, world: World, recovery: Recovery) -> bool:
    """Return True if ranks of a cut model may read their stages alone: none keeps those of all in shared memory."""
    if not isinstance(cut, CutModel):
        return False
    return cut.divisions is not None or not recovery.is_linked or local_world_size() < world.size


def _history_of(found: ResumedRun, best: str | None) -> EvaluationHistory:
    """Return the history of evaluations in a checkpoint.

    Raises:
        ValueError: Several evaluations in it have the metric that decides on the best checkpoint.
    """
    history = EvaluationHistory.restored(found.document["facts"].get("evaluations"))
    if best is not None:
        history.of(best)
    return history
