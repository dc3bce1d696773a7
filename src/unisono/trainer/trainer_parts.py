"""The parts of a Trainer, which `assemble` makes at the start of a run and all calls of the Trainer work with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from unisono.engine import StepDescription, WeightWrites
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.sharding.divided_model import DividedModel
from unisono.trainer.averages import DividedAverage
from unisono.trainer.carried import CarriedStates
from unisono.trainer.checkpointing import Checkpointing
from unisono.trainer.divided_tables import DividedTables
from unisono.trainer.evaluation_history import EvaluationHistory
from unisono.trainer.recoverable_state import RecoverableState
from unisono.trainer.recovery import Recovery
from unisono.trainer.run_context import RunContext
from unisono.trainer.settings import TrainerSettings
from unisono.trainer.shard_gathering import ShardGathering
from unisono.trainer.snapshot import Cursor, Subjects
from unisono.trainer.stage_gathering import StageGathering
from unisono.trainer.step import StepRunner
from unisono.trainer.step_runners import Engines
from unisono.trainer.worker_gathering import WorkerGathering

__all__ = ["Gathering", "TrainedModels", "TrainerParts"]

TrainedModels = nn.Module | Mapping[str, nn.Module]
Gathering = StageGathering | ShardGathering | WorkerGathering | DividedTables


@dataclass(kw_only=True, slots=True)
class TrainerParts:
    """The parts of a Trainer."""

    run: RunContext
    settings: TrainerSettings
    recovery: Recovery
    state: RecoverableState
    """Objects that depend on the present ranks."""
    carried: CarriedStates
    cut: CutModel | DividedModel | None
    """The model, if it is cut or divided over ranks."""
    gathering: Gathering | None
    """Brings its parts, or the state of workers, together."""
    keeper: Checkpointing
    modules: dict[str, nn.Module]
    runners: dict[str | None, StepRunner]
    """By the name of the optimizer; None: that of all, where there are several."""
    schedulers: dict[str, LRScheduler]
    averages: dict[str, AveragedModel]
    divided_average: DividedAverage | None
    """The average, if it is divided over ranks."""
    subjects: Subjects
    cursor: Cursor
    history: EvaluationHistory
    source: str | None
    """Path of the checkpoint that the run continues from; None: there is none."""
    warnings: list[str]
    """Sentences for the user about the directory and its checkpoint."""

    @property
    def engines(self) -> Engines:
        """Makes engines for the ranks that there are now."""
        return self.state.engines

    def compare(self, intent: StepDescription) -> None:
        """Check that all ranks are about to do the same. Every rank must call it."""
        self.engines.comparison.compare(intent)

    @property
    def weights(self) -> WeightWrites:
        """Writes values into the models between steps."""
        return self.engines.weights
