"""Makes the engines of a run whose model is cut over the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from unisono.engine.base import Engine
from unisono.engine.collective import CollectiveEngine
from unisono.engine.consistency import ConsistencyCheck, NoConsistencyCheck
from unisono.engine.host_tree_all_reduce import group_all_reduce
from unisono.engine.local import LocalEngine
from unisono.engine.staged.divided_engine import DividedStagedEngine
from unisono.engine.staged.stage_divisions import StageDivisions
from unisono.engine.staged.stage_map import StageOwnership
from unisono.engine.staged.stage_ranks import StageRanks
from unisono.engine.staged.staged_engine import StagedEngine
from unisono.engine.tree_all_reduce import MakeAllReduce
from unisono.engine.weight_writes import PrivateWeights, WeightWrites

__all__ = ["StagedEngineFactory"]


class StagedEngineFactory:
    """See `EngineFactory`.

    Args:
        ranks: The place of this rank.
        modules: The models.
        ownership: Who has which parameter.
        comparison: Compares what all ranks are about to do.
        virtual_ranks: Shares of a whole batch.
        overlap: If False, no gradient is added before backward has ended.
        divisions: The optimizers' state, divided over replicas; None: each replica has all of it.
    """

    shares = False

    def __init__(
        self,
        ranks: StageRanks,
        modules: Sequence[nn.Module],
        ownership: StageOwnership,
        comparison: ConsistencyCheck,
        *,
        virtual_ranks: int,
        overlap: bool,
        divisions: StageDivisions | None = None,
    ) -> None:
        self._ranks, self._modules, self._ownership = ranks, modules, ownership
        self._virtual_ranks, self._overlap, self._divisions = virtual_ranks, overlap, divisions
        self._made: list[Engine] = []
        self.comparison = comparison

    @property
    def weights(self) -> WeightWrites:
        """Writes values into the models between steps."""
        return PrivateWeights()

    def engine(self, optimizer: Optimizer) -> StagedEngine:
        """Make the engine of an optimizer. Every rank must call it, in the same order."""
        made: StagedEngine
        if self._divisions is not None:
            made = DividedStagedEngine(
                optimizer,
                self._ranks,
                self._divisions,
                self._ownership,
                modules=self._modules,
                virtual_ranks=self._virtual_ranks,
                overlap=self._overlap,
            )
        else:
            engines = {stage: self._make(optimizer, stage) for stage in self._ranks.own_stages}
            made = StagedEngine(optimizer, self._ranks, engines, self._ownership)
        self._made.append(made)
        return made

    def close(self) -> None:
        """Release the models and optimizers."""
        for engine in self._made:
            engine.close()

    def all_reduce_of(self, stage: int) -> MakeAllReduce:
        """Return what makes the all-reduce of a small vector over the ranks that compute a stage."""
        return partial(group_all_reduce, self._ranks.columns[stage], None)

    def _make(self, optimizer: Optimizer, stage: int) -> Engine:
        column = self._ranks.columns[stage]
        if column.group is None:
            return LocalEngine(optimizer, self._modules, resumes=self._overlap)
        # Ranks have been compared before the first message of the step. Gradients are taken after backward: shares of
        # several stages are under way at once.
        return CollectiveEngine(
            optimizer,
            self._modules,
            column,
            NoConsistencyCheck(),
            virtual_ranks=self._virtual_ranks,
            overlap=self._overlap,
            streams=False,
        )
