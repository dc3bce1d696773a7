"""Runs a schedule on one rank of a pipeline: passes of its stages, and messages from and to others.

Receives of large messages are posted some passes ahead, so that tensors arrive while the rank computes. Start reading
at `PipelineRunner.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unisono.activity import Observed, Wait
from unisono.collectives.freed_wait import wait_for_message
from unisono.parallel.pipeline.messages import Message, MessageLayout
from unisono.parallel.pipeline.placeholder import TensorLayout
from unisono.parallel.pipeline.plan_cache import PlanCache
from unisono.parallel.pipeline.routes import StageRoutes, stage_routes
from unisono.parallel.pipeline.schedule import Action, Schedule, make_schedule
from unisono.parallel.pipeline.stage import Gradients, Stage, StagePass
from unisono.parallel.pipeline.stage_plan import PipelinePlan

__all__ = ["LossRoot", "Passes", "PipelineRunner"]

LossRoot = tuple[Tensor, Tensor | None]
"""A tensor from which backward starts, and its gradient; None for 1."""

_CPU = torch.device("cpu")
_AHEAD = 2
"""Passes for which receives are posted before the one that runs."""
_LEAST_AHEAD = 512 * 1024
"""The size in bytes from which messages in shared memory are received ahead. A smaller one waits there, complete, and
costs less to copy than a second thread that takes it meanwhile: that thread took 5 % of a step."""
_KEPT_STAGES = 256
_KEPT_FUNCTIONS = 16


class Passes(Protocol):
    """The calls around the passes of a rank's stages, in the order of its schedule."""

    def turn_to(self, stage: int, *, backward: bool) -> None:
        """Note that a forward or backward pass of a stage comes next, before what it needs has arrived."""

    def begin_forward(self, stage: int, micro_batch: int) -> None:
        """Prepare a forward pass. On the first stage, it also seeds the generators."""

    def end_forward(self, stage: int, micro_batch: int, result: Any) -> None:
        """Take the result of a forward pass: on the last stage, what the function returned."""

    def begin_backward(self, stage: int, micro_batch: int) -> Sequence[LossRoot]:
        """Prepare a backward pass, or the part of it for inputs. Return the losses on the last stage, else nothing."""

    def begin_adding(self, stage: int, micro_batch: int) -> None:
        """Note that the gradients of parameters come next, of one micro-batch of a stage after the other."""

    def end_backward(self, stage: int, micro_batch: int) -> None:
        """Note that they have been added to `grad`."""


class _StageChannel(NamedTuple):
    """Where a message goes: between two stages there is one about each micro-batch, in each direction."""

    source: int
    target: int
    micro_batch: int


class _StageTransfer(NamedTuple):
    """A message that is under way, and the memory that it needs until it has arrived."""

    memory: Tensor
    work: dist.Work | None
    """None for a message between stages of this rank."""
    wait: Wait | None

    @property
    def is_over(self) -> bool:
        """True if nothing is left to wait for."""
        return self.work is None or self.work.is_completed()

    def finish(self) -> Tensor:
        """Wait until the message has arrived, as observers see; return its memory."""
        if self.work is not None:
            if self.wait is None or self.work.is_completed():
                self.work.wait()
            else:
                with Observed(self.wait):
                    wait_for_message(self.work)
        return self.memory


@dataclass(slots=True)
class _Step:
    """The messages and passes of one step that are under way."""

    function: Callable[..., Any]
    plans: Sequence[PipelinePlan]
    stage_ranks: tuple[int, ...]
    passes: dict[tuple[int, int], StagePass] = field(default_factory=dict)
    """By stage and micro-batch."""
    arrivals: dict[_StageChannel, _StageTransfer] = field(default_factory=dict)
    """Messages that come, or have come."""
    sends: list[_StageTransfer] = field(default_factory=list)
    weight_passes: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    """By stage and micro-batch, those whose passes for inputs have run."""

    def finish_sends(self) -> None:
        """Wait until other ranks have all messages."""
        for each in self.sends:
            each.finish()


class PipelineRunner:
    """One rank's part of a pipeline.

    Args:
        model: The whole model.
        starts: The names of the blocks with which stages begin, from the second stage on.
        schedule: The name of a schedule.
        group: The ranks of the pipeline, which sends from the CPU; stage s is on rank s modulo their number. None: one
            rank has all stages.
        layouts: Those of parameters whose memory has been given back, by name, as it is at the time.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        starts: Sequence[str],
        schedule: str,
        group: dist.ProcessGroup | None,
        layouts: Mapping[str, TensorLayout] = MappingProxyType({}),
    ) -> None:
        self._layouts = layouts
        self._model, self._starts = model, tuple(starts)
        self._plans: dict[Any, PlanCache] = {}
        self._schedule = schedule
        self._ranks, self._rank = (1, 0) if group is None else (group.size(), group.rank())
        self._stages: dict[tuple[int, int], tuple[Stage, StageRoutes]] = {}
        self.is_running = False
        """True while passes run."""
        self._waits: dict[tuple[str, int], Wait] = {}
        """By what is called and the other rank of the pipeline."""
        self.connect(group)

    def connect(self, group: dist.ProcessGroup | None) -> None:
        """Use another group of as many ranks, in the same order, from the next step on. None: release the group."""
        self._group = group
        self._least_ahead = _LEAST_AHEAD if group is not None and "shm" in dist.get_backend(group) else 0
        self._waits.clear()

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self._starts) + 1

    def plan(self, function: Callable[..., Any], inputs: Sequence[Any], state: Hashable = None) -> PipelinePlan:
        """Return the plan for a function and the inputs of a micro-batch.

        A function that is defined anew in each step, such as a lambda, has the plans of its code.

        Args:
            function: The forward pass with its loss.
            inputs: Those of a micro-batch.
            state: What `model_state` has returned just before. None: it is called.

        Raises:
            CutError: The model cannot be cut so.
        """
        key = getattr(function, "__code__", function)
        if key not in self._plans:
            if len(self._plans) >= _KEPT_FUNCTIONS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = PlanCache(self._model, starts=self._starts, layouts=self._layouts)
        return self._plans[key].plan_for(function, inputs, state)

    def run(
        self,
        function: Callable[..., Any],
        micro_batches: Sequence[Sequence[Any]],
        plans: Sequence[PipelinePlan],
        passes: Passes,
    ) -> None:
        """Run forward and backward of some micro-batches; add gradients to `grad` where a parameter is used first.

        Args:
            function: The forward pass with its loss, called with the model and the inputs of a micro-batch.
            micro_batches: The inputs of each, the same on all ranks.
            plans: The plan of each.
            passes: Told of all passes.
        """
        schedule = self._schedule_for(len(micro_batches))
        actions = schedule.actions[self._rank]
        step = _Step(function, plans, schedule.stage_ranks)
        with self._running():
            for action in self._with_receives(step, actions):
                if action.kind == "forward":
                    self._forward(step, action, micro_batches[action.micro_batch], passes)
                elif action.kind == "backward_weight":
                    self._backward_weight(step, action, passes)
                else:
                    self._backward(step, action, passes)
                step.sends = [each for each in step.sends if not each.is_over]
            step.finish_sends()

    def infer(
        self,
        function: Callable[..., Any],
        micro_batches: Sequence[Sequence[Any]],
        plans: Sequence[PipelinePlan],
        passes: Passes,
    ) -> None:
        """Run forward passes alone, one micro-batch after the other; see `run`.

        With "breadth-first", all of them go through a stage before the rank turns to its next one.
        """
        stages, numbers = range(self._rank, self.num_stages, self._ranks), range(len(micro_batches))
        if self._schedule == "breadth-first":
            actions = [Action("forward", stage, number) for stage in stages for number in numbers]
        else:
            actions = [Action("forward", stage, number) for number in numbers for stage in stages]
        stage_ranks = tuple(stage % self._ranks for stage in range(self.num_stages))
        step = _Step(function, plans, stage_ranks)
        with self._running():
            for action in self._with_receives(step, actions):
                self._forward(step, action, micro_batches[action.micro_batch], passes)
                step.passes.clear()
                step.sends = [each for each in step.sends if not each.is_over]
            step.finish_sends()

    @contextmanager
    def _running(self) -> Iterator[None]:
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def _parameter_layouts(self) -> dict[str, TensorLayout]:
        named = self._model.named_parameters()
        return {name: self._layouts.get(name) or TensorLayout.of(parameter) for name, parameter in named}

    def _schedule_for(self, micro_batches: int) -> Schedule:
        return make_schedule(
            self._schedule,
            ranks=self._ranks,
            micro_batches=micro_batches,
            stages_per_rank=-(-self.num_stages // self._ranks),
        )

    def _with_receives(self, step: _Step, actions: Sequence[Action]) -> Iterator[Action]:
        """Yield the passes in turn; receives for the next ones have been posted by then."""
        for place, action in enumerate(actions):
            for coming in actions[0 if not place else place + _AHEAD : place + _AHEAD + 1]:
                self._post(step, coming, ahead=True)
            self._post(step, action, ahead=False)
            yield action

    def _forward(self, step: _Step, action: Action, inputs: Sequence[Any], passes: Passes) -> None:
        stage, routes = self._stage_of(step.plans[action.micro_batch], action.stage)
        passes.turn_to(action.stage, backward=False)
        messages = self._receive(step, action, routes.values_from)
        states = [message.random_state for message in messages if message.random_state is not None]

        def send(done: StagePass) -> None:
            self._send(step, action, routes.values_to, Message(done.sent, done.random_state))

        passes.begin_forward(action.stage, action.micro_batch)
        done = stage.forward(
            step.function,
            inputs,
            {value: tensor for message in messages for value, tensor in message.tensors.items()},
            random_state=states[0] if states else None,
            on_end=send,
        )
        step.passes[action.stage, action.micro_batch] = done
        result, done.result = done.result, None
        passes.end_forward(action.stage, action.micro_batch, result)

    def _backward(self, step: _Step, action: Action, passes: Passes) -> None:
        stage, routes = self._stage_of(step.plans[action.micro_batch], action.stage)
        passes.turn_to(action.stage, backward=True)
        gradients = Gradients()
        for message in self._receive(step, action, routes.gradients_from):
            for key, gradient in message.tensors.items():
                (gradients.values if isinstance(key, int) else gradients.parameters)[key] = gradient
        done = step.passes.pop((action.stage, action.micro_batch))
        losses = passes.begin_backward(action.stage, action.micro_batch)
        parts = None
        if action.kind == "backward_input":
            parts = stage.backward_in_parts(done, gradients, losses=losses)
        if parts is None:
            for each in [each for each in step.weight_passes if each[0] == action.stage]:
                self._backward_weight(step, Action("backward_weight", *each), passes)  # micro-batches stay in order
            passes.begin_adding(action.stage, action.micro_batch)
            given = stage.backward(done, gradients, losses=losses)
        else:
            given, step.weight_passes[action.stage, action.micro_batch] = parts
        self._send(step, action, routes.gradients_to, Message({**given.values, **given.parameters}))
        if parts is None:
            passes.end_backward(action.stage, action.micro_batch)

    def _backward_weight(self, step: _Step, action: Action, passes: Passes) -> None:
        """Add the gradients of parameters, unless that has been done with those of inputs."""
        add = step.weight_passes.pop((action.stage, action.micro_batch), None)
        if add is not None:
            passes.begin_adding(action.stage, action.micro_batch)
            add()
            passes.end_backward(action.stage, action.micro_batch)

    def _stage_of(self, plan: PipelinePlan, number: int) -> tuple[Stage, StageRoutes]:
        # A stage keeps its plan, so that no other has this id.
        key = id(plan), number
        if key not in self._stages:
            if len(self._stages) >= _KEPT_STAGES:
                self._stages.clear()
            stage = Stage(plan, number, self._model, starts=self._starts)
            self._stages[key] = stage, stage_routes(plan, number, self._parameter_layouts())
        return self._stages[key]

    def _post(self, step: _Step, action: Action, *, ahead: bool) -> None:
        """Begin to receive what a pass needs: the messages that are received ahead of it, or the others."""
        if action.kind == "backward_weight":
            return
        _, routes = self._stage_of(step.plans[action.micro_batch], action.stage)
        for source, layout in (routes.values_from if action.kind == "forward" else routes.gradients_from).items():
            rank, channel = step.stage_ranks[source], _StageChannel(source, action.stage, action.micro_batch)
            if rank != self._rank and (layout.nbytes >= self._least_ahead) is ahead:
                memory = layout.allocate(_CPU)
                work = dist.irecv(memory, group=self._group, group_src=rank, tag=self._tag(channel))
                step.arrivals[channel] = _StageTransfer(memory, work, self._wait("recv", rank))

    def _receive(self, step: _Step, action: Action, layouts: Mapping[int, MessageLayout[Any]]) -> list[Message[Any]]:
        """Wait for the messages that a pass needs."""
        found = []
        for source, layout in layouts.items():
            arrival = step.arrivals.pop(_StageChannel(source, action.stage, action.micro_batch))
            found.append(layout.unpack(arrival.finish()))
        return found

    def _send(
        self, step: _Step, action: Action, layouts: Mapping[int, MessageLayout[Any]], content: Message[Any]
    ) -> None:
        for target, layout in layouts.items():
            rank, channel = step.stage_ranks[target], _StageChannel(action.stage, target, action.micro_batch)
            memory = layout.pack(content)
            if rank == self._rank:
                step.arrivals[channel] = _StageTransfer(memory, None, None)
            else:
                memory = memory.to(_CPU)
                work = dist.isend(memory, group=self._group, group_dst=rank, tag=self._tag(channel))
                step.sends.append(_StageTransfer(memory, work, self._wait("send", rank)))

    def _wait(self, name: str, rank: int) -> Wait:
        """Return the wait for a message, as observers see it."""
        key = name, rank
        if key not in self._waits:
            assert self._group is not None
            peer = dist.get_global_rank(self._group, rank)
            self._waits[key] = Wait(name, self._group.group_name, self._ranks, 0, peer)
        return self._waits[key]

    def _tag(self, channel: _StageChannel) -> int:
        return (channel.micro_batch * self.num_stages + channel.source) * self.num_stages + channel.target
