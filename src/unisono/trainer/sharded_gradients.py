"""Gradients of a model that is divided over ranks: each rank computes its shares, with blocks that come together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import nn

from unisono.data.batch import Batch
from unisono.engine import BufferTransaction, Trained
from unisono.parallel.losses import WeightedSum
from unisono.parallel.sharding.divided_model import DividedModel
from unisono.trainer.carried import CarriedStates
from unisono.trainer.run_context import RunContext
from unisono.trainer.step_gradients import Loss, StepOptions
from unisono.trainer.virtual_rank_gradients import VirtualRankGradients

__all__ = ["ShardedGradients"]


class ShardedGradients(VirtualRankGradients):
    """Computes the gradients of this rank's shares, and hands them to the engine."""

    def __init__(
        self,
        run: RunContext,
        *,
        models: Any,
        modules: Mapping[str, nn.Module],
        buffers: BufferTransaction,
        carried: CarriedStates,
        autocast: Literal["bf16", "fp16"] | None,
        divided: DividedModel,
    ) -> None:
        super().__init__(run, models=models, modules=modules, buffers=buffers, carried=carried, autocast=autocast)
        self._divided = divided
        self.hint = (
            "A parameter that is used without a call of its block is NaN there: with parallel=Shard(...), leave such "
            "blocks out of by=."
        )

    def present(self, trained: Trained) -> Trained:
        """Return the parameters that this rank has memory for: all of them before the first step, then none."""
        return trained if self._divided.division.has_weights else Trained((), ())

    def prepare(self, loss_fn: Loss, batch: Batch) -> None:
        """Give back the memory of what other ranks have."""
        self._divided.division.divide()

    def compute(
        self, loss_fn: Loss, batch: Batch, trained: Trained, *, restricted: bool, call: int, options: StepOptions
    ) -> None:
        """Run forward and backward for all shares of this rank; see `StepGradients`."""
        with self._divided.computing():
            super().compute(loss_fn, batch, trained, restricted=restricted, call=call, options=options)

    def _run_backward(self, value: WeightedSum, size: int) -> None:
        with self._divided.backward():
            super()._run_backward(value, size)
