"""Runs a schedule on one rank of a pipeline: passes of its stages, and messages from and to others.

Receives are posted some passes ahead, so that tensors arrive while the rank computes. Start reading at
`PipelineRunner.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from unisono.parallel.pipeline.messages import Message, MessageLayout
from unisono.parallel.pipeline.placeholder import TensorLayout
from unisono.parallel.pipeline.plan_cache import PlanCache
from unisono.parallel.pipeline.routes import StageRoutes, stage_routes
from unisono.parallel.pipeline.schedule import Action, Schedule, make_schedule
from unisono.parallel.pipeline.stage import Gradients, Stage, StagePass
from unisono.parallel.pipeline.stage_plan import PipelinePlan

__all__ = ["LossRoot", "PipelineRunner"]

LossRoot = tuple[Tensor, Tensor | None]
"""A tensor from which backward starts, and its gradient; None for 1."""

_AHEAD = 2
"""Passes for which receives are posted before the one that runs."""
_KEPT_STAGES = 256


class _Channel(NamedTuple):
    """Where a message goes: between two stages there is one about each micro-batch, in each direction."""

    source: int
    target: int
    micro_batch: int


@dataclass(slots=True)
class _Step:
    """What one step has under way."""

    plans: Sequence[PipelinePlan]
    schedule: Schedule
    passes: dict[tuple[int, int], StagePass] = field(default_factory=dict)
    """By stage and micro-batch."""
    arrivals: dict[_Channel, tuple[Tensor, dist.Work | None]] = field(default_factory=dict)
    """Messages that come, or have come; without work those between stages of this rank."""
    sends: list[tuple[Tensor, dist.Work]] = field(default_factory=list)


class PipelineRunner:
    """One rank's part of a pipeline.

    Args:
        model: The whole model.
        function: The forward pass with its loss, called with the model and the inputs of a micro-batch.
        starts: The names of the blocks with which stages begin, from the second stage on.
        schedule: The name of a schedule.
        group: The ranks of the pipeline; stage s is on rank s modulo their number. None: one rank has all stages.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[..., Any],
        *,
        starts: Sequence[str],
        schedule: str,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._model, self._function, self._starts = model, function, tuple(starts)
        self._plans = PlanCache(model, function, starts=starts)
        self._schedule, self._group = schedule, group
        self._ranks, self._rank = (1, 0) if group is None else (group.size(), group.rank())
        self._stages: dict[tuple[int, int], tuple[Stage, StageRoutes]] = {}

    def run(
        self,
        micro_batches: Sequence[Sequence[Any]],
        *,
        begin: Callable[[int], None],
        read: Callable[[int, Any], Sequence[LossRoot]],
    ) -> list[Any]:
        """Run forward and backward of some micro-batches; add gradients to `grad` where a parameter is used first.

        Args:
            micro_batches: The inputs of each, the same on all ranks.
            begin: Called on the first stage with the number of a micro-batch, before its forward pass: seeds the
                generators.
            read: Called on the last stage with the number of a micro-batch and its result; returns the losses.

        Returns:
            The results on the rank of the last stage, and on others what stands for them.
        """
        schedule = make_schedule(
            self._schedule,
            ranks=self._ranks,
            micro_batches=len(micro_batches),
            stages_per_rank=-(-(len(self._starts) + 1) // self._ranks),
        )
        step = _Step([self._plans.plan_for(inputs) for inputs in micro_batches], schedule)
        actions = schedule.actions[self._rank]
        results: list[Any] = [None] * len(micro_batches)
        for place, action in enumerate(actions):
            for coming in actions[0 if not place else place + _AHEAD : place + _AHEAD + 1]:
                self._post(step, coming)
            number = action.micro_batch
            if action.kind == "forward":
                results[number] = self._forward(step, action, micro_batches[number], begin)
            else:
                is_last = action.stage == len(self._starts)
                self._backward(step, action, read(number, results[number]) if is_last else ())
            step.sends = [each for each in step.sends if not each[1].is_completed()]
        for _, work in step.sends:
            work.wait()
        return results

    def _forward(self, step: _Step, action: Action, inputs: Sequence[Any], begin: Callable[[int], None]) -> Any:
        """Run a forward pass and return its result."""
        stage, routes = self._stage_of(step.plans[action.micro_batch], action.stage)
        messages = self._receive(step, action, routes.values_from)
        states = [message.random_state for message in messages if message.random_state is not None]

        def send(done: StagePass) -> None:
            self._send(step, action, routes.values_to, Message(done.sent, done.random_state))

        if not action.stage:
            begin(action.micro_batch)
        done = stage.forward(
            self._function,
            inputs,
            {value: tensor for message in messages for value, tensor in message.tensors.items()},
            random_state=states[0] if states else None,
            on_end=send,
        )
        step.passes[action.stage, action.micro_batch] = done
        return done.result

    def _backward(self, step: _Step, action: Action, losses: Sequence[LossRoot]) -> None:
        stage, routes = self._stage_of(step.plans[action.micro_batch], action.stage)
        gradients = Gradients()
        for message in self._receive(step, action, routes.gradients_from):
            for key, gradient in message.tensors.items():
                (gradients.values if isinstance(key, int) else gradients.parameters)[key] = gradient
        done = step.passes.pop((action.stage, action.micro_batch))
        given = stage.backward(done, gradients, losses=losses)
        self._send(step, action, routes.gradients_to, Message({**given.values, **given.parameters}))

    def _stage_of(self, plan: PipelinePlan, number: int) -> tuple[Stage, StageRoutes]:
        # A stage keeps its plan, so that no other has this id.
        key = id(plan), number
        if key not in self._stages:
            if len(self._stages) >= _KEPT_STAGES:
                self._stages.clear()
            parameters = {name: TensorLayout.of(parameter) for name, parameter in self._model.named_parameters()}
            stage = Stage(plan, number, self._model, starts=self._starts)
            self._stages[key] = stage, stage_routes(plan, number, parameters)
        return self._stages[key]

    def _post(self, step: _Step, action: Action) -> None:
        """Begin to receive what a pass needs."""
        _, routes = self._stage_of(step.plans[action.micro_batch], action.stage)
        for source, layout in (routes.values_from if action.kind == "forward" else routes.gradients_from).items():
            rank, channel = step.schedule.stage_ranks[source], _Channel(source, action.stage, action.micro_batch)
            if rank != self._rank:
                memory = layout.allocate()
                work = dist.irecv(memory, group=self._group, group_src=rank, tag=self._tag(channel))
                step.arrivals[channel] = memory, work

    def _receive(self, step: _Step, action: Action, layouts: Mapping[int, MessageLayout[Any]]) -> list[Message[Any]]:
        """Wait for the messages that a pass needs."""
        found = []
        for source, layout in layouts.items():
            memory, work = step.arrivals.pop(_Channel(source, action.stage, action.micro_batch))
            if work is not None:
                work.wait()
            found.append(layout.unpack(memory))
        return found

    def _send(
        self, step: _Step, action: Action, layouts: Mapping[int, MessageLayout[Any]], content: Message[Any]
    ) -> None:
        for target, layout in layouts.items():
            rank, channel = step.schedule.stage_ranks[target], _Channel(action.stage, target, action.micro_batch)
            memory = layout.pack(content)
            if rank == self._rank:
                step.arrivals[channel] = memory, None
            else:
                work = dist.isend(memory, group=self._group, group_dst=rank, tag=self._tag(channel))
                assert work is not None
                step.sends.append((memory, work))

    def _tag(self, channel: _Channel) -> int:
        stages = len(self._starts) + 1
        return (channel.micro_batch * stages + channel.source) * stages + channel.target
