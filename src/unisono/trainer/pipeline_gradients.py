"""Gradients of a model that is cut over ranks: each rank runs the passes of its stages, in the order of a schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from unisono.data.batch import Batch, MicroBatch, Share
from unisono.engine import Trained
from unisono.engine.model_contents import plain_name
from unisono.engine.staged import StagedBuffers, StagedEngine
from unisono.job.user_function import enter, leave
from unisono.parallel.losses import further_values
from unisono.parallel.pipeline.cut_model import CutModel
from unisono.parallel.pipeline.plan_cache import model_state
from unisono.parallel.pipeline.runner import LossRoot
from unisono.parallel.pipeline.stage_plan import PipelinePlan
from unisono.parallel.pipeline.stage_turns import StageTurns
from unisono.trainer.modules import to_device
from unisono.trainer.run_context import RunContext
from unisono.trainer.step_gradients import Loss, StepGradients, StepOptions, model_stream

__all__ = ["PipelineGradients"]


class _GradientPart(NamedTuple):
    """A micro-batch of a step."""

    share: Share
    micro_batch: MicroBatch
    number: int
    """Its number in the share."""
    inputs: tuple[Any]

    @property
    def is_last(self) -> bool:
        """True if it is the last one of its share."""
        return self.micro_batch is self.share.micro_batches[-1]


class PipelineGradients(StepGradients):
    """Computes the gradients of this rank's stages for the shares of its replica, and hands them to their engines."""

    engine: StagedEngine

    def __init__(
        self,
        run: RunContext,
        *,
        models: Any,
        modules: Mapping[str, nn.Module],
        buffers: StagedBuffers,
        autocast: Literal["bf16", "fp16"] | None,
        cut: CutModel,
    ) -> None:
        super().__init__(run, models=models, modules=modules, autocast=autocast)
        self.cut, self.staged_buffers = cut, buffers
        self._parts: list[_GradientPart] = []
        self._plans: list[PipelinePlan] = []

    def present(self, trained: Trained) -> Trained:
        """Return the parameters that this rank has memory for: all of them before the first step."""
        foreign = {plain_name(name) for name in self.cut.foreign}
        apart = set[int]() if self.cut.divisions is None else self.cut.divisions.apart
        pairs = [(name, p) for name, p in zip(*trained, strict=True) if name not in foreign and id(p) not in apart]
        return Trained(tuple(name for name, _ in pairs), tuple(p for _, p in pairs))

    def prepare(self, loss_fn: Loss, batch: Batch) -> None:
        """Plan the passes of a batch; in the first step, agree with all ranks on which stage has what."""
        self.cut.refuse_writes(self.cut.model)
        self._parts = [
            _GradientPart(share, micro_batch, number, (to_device(micro_batch.items, self._run.device),))
            for share in batch.shares
            for number, micro_batch in enumerate(share.micro_batches)
        ]
        self._plans = []
        inside = enter("the loss function")
        try:
            if self.cut.starts is None:
                self._divide(loss_fn)
            model, state = self.cut.model, model_state(self.cut.model)
            for part in self._parts:
                with self._forward_context(len(part.micro_batch.indices)):
                    self._plans.append(self.cut.plan(model, loss_fn, part.inputs, state))
        finally:
            leave(inside)
        if self.cut.ownership.map is None:
            self.cut.settle(self._plans[0] if self._plans else None)
            self.staged_buffers.settle()
        self.cut.release()

    def _divide(self, loss_fn: Loss) -> None:
        """Find where stages begin, by the first micro-batch."""
        first = next(iter(self._parts), None)
        samples = 0 if first is None else len(first.micro_batch.indices)
        inputs = None if first is None else first.inputs

        def loss_of(result: Any) -> Tensor:
            return self._read(result, samples=samples)[0].total

        with self._forward_context(samples):
            self.cut.divide(loss_fn, inputs, micro_batches=len(self._parts), loss_of=loss_of)

    def compute(
        self, loss_fn: Loss, batch: Batch, trained: Trained, *, restricted: bool, call: int, options: StepOptions
    ) -> None:
        """Run the passes of this rank's stages; see `StepGradients`."""
        del restricted, options
        self.losses = []
        if not self.values.is_empty:
            self.values.clear()
        turns = self.cut.turns(self.cut.model, backward=True)
        passes = _StepPasses(self, self._parts, batch, call, turns)

        def forward(model: Any, items: Any) -> Any:
            with self._forward_context(passes.samples):
                return loss_fn(model, items)

        inside = enter("the loss function")
        try:
            with turns:
                inputs = [part.inputs for part in self._parts]
                self.cut.runner(self.cut.model).run(forward, inputs, self._plans, passes)
                turns.finish()
        finally:
            leave(inside)
            self._parts, self._plans = [], []

    def begin_forward(self, part: _GradientPart, stage: int, batch: Batch, call: int) -> None:
        """Prepare a forward pass of a stage."""
        if not stage:
            self._run.set_generators(*model_stream(batch, call, part.share.virtual_rank, part.number))
        self.staged_buffers.stages[stage].stand_in()
        self._run.note("forward", part.share.virtual_rank, part.micro_batch.indices)

    def end_forward(self, part: _GradientPart, stage: int) -> bool:
        """Keep what a share has made of buffers; return True if it changed one that no step before had changed."""
        buffers = self.staged_buffers.stages[stage]
        is_new = buffers.new_buffers()
        buffers.close_leaf(part.share.virtual_rank)
        return is_new

    def read_loss(self, part: _GradientPart, result: Any, *, size: int) -> tuple[list[LossRoot], Tensor, float]:
        """Return where backward starts from a result of the loss function, the sum of its losses, and their weight."""
        samples = len(part.micro_batch.indices)
        value, weight = self._read(result, samples=samples, needs_graph=self.scaler is not None)
        if type(result) is dict and (further := further_values(result)):
            self.values.add(part.share.virtual_rank, further, samples=samples)
        total = value.total if value.losses is not None else value.total.detach()
        if self.scaler is not None:
            roots: list[LossRoot] = [(self.scaler.scale(value.total / size), None)]
        else:
            root = value.total if value.losses is None else value.losses
            roots = [(root, self._backward.seed_for(root, size))]
        return roots, total.float(), weight

    def begin_backward(self, part: _GradientPart) -> None:
        """Note that a backward pass comes next."""
        self._run.note("backward", part.share.virtual_rank)

    def begin_adding(
        self, part: _GradientPart, stage: int, loss: Tensor | None, weight: float, *, new_buffers: bool
    ) -> None:
        """Note that the gradients of a micro-batch come next; with the last one of a share, what it has come to."""
        if part.is_last:
            self.engine.stages[stage].close_forward(
                part.share.virtual_rank,
                torch.zeros(()) if loss is None else loss,
                weight,
                new_buffers=new_buffers,
                has_values=not self.values.is_empty,
                wants=self._run.wants(),
            )

    def end_backward(self, part: _GradientPart, stage: int) -> None:
        """Hand the gradients of a share to the engine of the stage, if this was its last micro-batch."""
        if part.is_last:
            self.engine.stages[stage].close_leaf(part.share.virtual_rank)


class _StepPasses:
    """The passes of one step; see `runner.Passes`."""

    def __init__(
        self,
        gradients: PipelineGradients,
        parts: Sequence[_GradientPart],
        batch: Batch,
        call: int,
        turns: StageTurns,
    ) -> None:
        self._gradients, self._parts, self._batch, self._call = gradients, parts, batch, call
        self.turn_to = turns.turn_to
        self._last_stage = gradients.cut.ranks.stages - 1
        self._roots: dict[int, Sequence[LossRoot]] = {}
        self._losses: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}
        self._new_buffers: set[tuple[int, int]] = set()
        self.samples = 0
        """The number of samples of the forward pass under way."""

    def begin_forward(self, stage: int, micro_batch: int) -> None:
        part = self._parts[micro_batch]
        self.samples = len(part.micro_batch.indices)
        self._gradients.begin_forward(part, stage, self._batch, self._call)

    def end_forward(self, stage: int, micro_batch: int, result: Any) -> None:
        part, virtual_rank = self._parts[micro_batch], self._parts[micro_batch].share.virtual_rank
        if stage == self._last_stage:
            roots, loss, weight = self._gradients.read_loss(part, result, size=self._batch.size)
            self._roots[micro_batch] = roots
            before = self._losses.get(virtual_rank)
            self._losses[virtual_rank] = loss if before is None else before + loss
            self._weights[virtual_rank] = self._weights.get(virtual_rank, 0.0) + weight
            if part.is_last:
                self._gradients.losses.append((part.share, self._losses[virtual_rank]))
        if part.is_last and self._gradients.end_forward(part, stage):
            self._new_buffers.add((stage, virtual_rank))

    def begin_backward(self, stage: int, micro_batch: int) -> Sequence[LossRoot]:
        self._gradients.begin_backward(self._parts[micro_batch])
        return self._roots.pop(micro_batch) if stage == self._last_stage else ()

    def begin_adding(self, stage: int, micro_batch: int) -> None:
        part, virtual_rank = self._parts[micro_batch], self._parts[micro_batch].share.virtual_rank
        is_last_stage = stage == self._last_stage
        self._gradients.begin_adding(
            part,
            stage,
            self._losses.get(virtual_rank) if is_last_stage else None,
            self._weights.get(virtual_rank, 0.0) if is_last_stage else 0.0,
            new_buffers=(stage, virtual_rank) in self._new_buffers,
        )

    def end_backward(self, stage: int, micro_batch: int) -> None:
        self._gradients.end_backward(self._parts[micro_batch], stage)
