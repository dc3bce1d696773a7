"""The engine of a rank in a pipeline whose replicas divide the optimizers' state, or stages as a whole, among them.

Gradients of a stage are summed over its ranks, one of each replica, as those of a model that is divided over ranks with
`zero=1`: each rank gets the sum of its part, updates it, and sends the new weights to the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from unisono.engine.base import Preparation, Trained
from unisono.engine.sharded.sharded_engine import (
    LARGE_NBYTES,
    PartOfGradient,
    ShardedEngine,
    prepare_parts,
    update_parts,
)
from unisono.engine.staged.stage_divisions import StageDivisions
from unisono.engine.staged.stage_map import StageOwnership
from unisono.engine.staged.stage_ranks import StageRanks
from unisono.engine.staged.staged_engine import StagedEngine
from unisono.engine.step_transaction import StepTransaction
from unisono.machine import give_memory_back

__all__ = ["DividedStagedEngine"]


class DividedStagedEngine(StagedEngine):
    """See `StagedEngine`. p.grad is None after a step: no rank has the whole gradient of a parameter.

    Args:
        optimizer: The optimizer, of all parameters of the model.
        ranks: The place of this rank.
        divisions: The state of this rank's stages.
        ownership: Who has which parameter.
        modules: The models.
        virtual_ranks: Shares of a whole batch.
    """

    divides_update = True

    def __init__(
        self,
        optimizer: Optimizer,
        ranks: StageRanks,
        divisions: StageDivisions,
        ownership: StageOwnership,
        *,
        modules: Sequence[nn.Module],
        virtual_ranks: int,
        overlap: bool,
    ) -> None:
        super().__init__(optimizer, ranks, {}, ownership)
        self.copies_weights = not divisions.divides_weights
        self._divisions, self._modules = divisions, modules
        self._virtual_ranks, self._overlap = virtual_ranks, overlap
        self._engines: dict[int, ShardedEngine] = {}

    def start(self, step: StepTransaction, trained: Trained, *, leaves: int) -> None:
        """Begin a step; see `Engine`. The first one has found what stages have."""
        self._divisions.divide()
        if not self._engines:
            # Gradients are taken after backward, since shares of several stages are under way at once.
            self.stages = self._engines = {
                stage: ShardedEngine(
                    self._optimizer,
                    self._modules,
                    self._ranks.columns[stage],
                    division,
                    virtual_ranks=self._virtual_ranks,
                    overlap=self._overlap,
                    streams=False,
                )
                for stage, division in self._divisions.of_stage.items()
            }
        super().start(step, trained, leaves=leaves)
        own = sum(unit.cpu_nbytes for division in self._divisions.of_stage.values() for unit in division.units)
        if own >= LARGE_NBYTES:
            give_memory_back()

    def prepare(self, preparation: Preparation) -> float | None:
        """Multiply, unscale and clip the sums; see `Engine`. The norm is that of all parts of all stages."""

        def everyone(found: PartOfGradient) -> list[PartOfGradient]:
            column = next(iter(self._ranks.columns.values()))
            of_stages = column.gather(found, "trainer.step preparing gradients")
            of_all = self._ranks.pipeline.gather(of_stages, "trainer.step preparing gradients")
            return [*itertools.chain.from_iterable(of_all)]

        return prepare_parts([*self._engines.values()], preparation, everyone)

    def update(self, scaler: torch.amp.GradScaler | None) -> None:
        """Update this rank's parts, and send the weights that other ranks need; see `Engine`."""
        self._ownership.whole = "nowhere"
        update_parts([*self._engines.values()], scaler)
        self._shared.send()
