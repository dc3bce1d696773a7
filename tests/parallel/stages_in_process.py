"""Runs all stages of a pipeline in one process, each with its own copy of the model; messages are dictionaries."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.parallel.pipeline.leaves import flatten
from unisono.parallel.pipeline.plan_cache import PlanCache
from unisono.parallel.pipeline.stage import Gradients, Stage, StagePass
from unisono.parallel.pipeline.stage_plan import PipelinePlan


def carried(tensor: Tensor) -> Tensor:
    """A copy as a receiver has it: the same strides, no graph."""
    tensor = tensor.detach()
    thin = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
    expanded = thin.clone().expand(tensor.shape)
    if expanded.stride() == tensor.stride():
        return expanded
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


@dataclass
class Outcome:
    plan: PipelinePlan
    models: list[nn.Module]
    results: list[Any]
    divided: set[int]
    """The stages whose backward passes ran in two parts."""


def in_stages(
    model: nn.Module,
    function: Callable[..., Any],
    batches: Sequence[Sequence[Any]],
    starts: Sequence[str],
    loss_of: Callable[[Any], Tensor],
    in_flight: int = 1,
    in_parts: bool = False,
) -> Outcome:
    models = [copy.deepcopy(model) for _ in range(len(starts) + 1)]
    plans = PlanCache(model, starts=starts)
    plan = plans.plan_for(function, batches[0])
    for number, own in enumerate(models):
        for name, parameter in own.named_parameters():
            if number not in plan.parameter_stages.get(name, ()):
                parameter.data.fill_(float("nan"))  # must not be read
    results, divided = [], set()
    stages_of = {}  # by plan, for all its passes, as in a run
    for first in range(0, len(batches), in_flight):
        passing = []
        for inputs in batches[first : first + in_flight]:
            plan = plans.plan_for(function, inputs)
            if id(plan) not in stages_of:
                stages_of[id(plan)] = [Stage(plan, number, own, starts=starts) for number, own in enumerate(models)]
            stages = stages_of[id(plan)]
            passing.append((plan, stages, _forward(stages, function, inputs)))
        later = []
        for plan, stages, passes in passing:  # several at once, as in a schedule, in their order
            weight_passes = _backward(plan, stages, passes, loss_of(passes[-1].result), in_parts=in_parts)
            divided |= weight_passes.keys()
            later += weight_passes.values()
            results.append(passes[-1].result)
        for run in later:
            run()
    return Outcome(plan, models, results, divided)


def _forward(stages: Sequence[Stage], function: Callable[..., Any], inputs: Sequence[Any]) -> list[StagePass]:
    state, sent, passes = torch.get_rng_state(), {}, []
    for number, stage in enumerate(stages):
        torch.manual_seed(1000 + number)  # as another process: its own generator
        received = {one.value: carried(sent[one.value]) for one in stage.plan.received}
        done = stage.forward(function, inputs, received, random_state=state)
        assert done.random_state is not None
        state = done.random_state
        sent.update(done.sent)
        passes.append(done)
    torch.set_rng_state(state)
    return passes


def _backward(
    plan: PipelinePlan, stages: Sequence[Stage], passes: Sequence[StagePass], loss: Tensor, *, in_parts: bool
) -> dict[int, Callable[[], None]]:
    boxes, later = [Gradients() for _ in stages], {}
    for number in reversed(range(len(stages))):
        losses = [(loss, None)] if number == len(stages) - 1 else []
        parts = stages[number].backward_in_parts(passes[number], boxes[number], losses=losses) if in_parts else None
        if parts is None:
            given = stages[number].backward(passes[number], boxes[number], losses=losses)
        else:
            given, later[number] = parts
        for transfer in stages[number].plan.received:
            if transfer.value in given.values:
                to = transfer.gradient_target(number)
                boxes[to].values[transfer.value] = carried(given.values[transfer.value])
        for name, gradient in given.parameters.items():
            users = plan.parameter_stages[name]
            boxes[users[users.index(number) - 1]].parameters[name] = carried(gradient)
    return later


def differences(
    model: nn.Module,
    function: Callable[..., Any],
    batches: Sequence[Sequence[Any]],
    starts: Sequence[str],
    loss_of: Callable[[Any], Tensor] = lambda result: result,
    in_flight: int = 1,
    divided: set[int] | None = None,
) -> list[str]:
    """Name everything in which stages differ from one process: results, gradients, buffers, generator, divisions.

    With the stages whose backward passes are to run in two parts, they do, and others do not.
    """
    torch.manual_seed(5)
    whole, expected = copy.deepcopy(model), []
    for inputs in batches:
        expected.append(function(whole, *inputs))
        loss_of(expected[-1]).backward()
    generator = torch.get_rng_state()
    torch.manual_seed(5)
    found = in_stages(model, function, batches, starts, loss_of, in_flight, in_parts=divided is not None)
    differing = [] if torch.equal(generator, torch.get_rng_state()) else ["generator"]
    if divided is not None and found.divided != divided:
        differing.append(f"divided {found.divided}")
    for place, (one, other) in enumerate(zip(_tensors(expected), _tensors(found.results), strict=True)):
        if not torch.equal(one, other):
            differing.append(f"result {place}")
    for name, parameter in whole.named_parameters():
        owner = found.plan.parameter_stages.get(name, (0,))[0]
        other = found.models[owner].get_parameter(name).grad
        if (parameter.grad is None) != (other is None) or (
            other is not None and not torch.equal(parameter.grad, other)
        ):
            differing.append(name)
    modified_on = {
        name: stage.stage
        for stage in found.plan.stages
        for call in found.plan.program.calls[stage.begin : stage.end]
        for name in call.written_buffers
    }
    for name, buffer in whole.named_buffers():
        if not torch.equal(buffer, found.models[modified_on.get(name, 0)].get_buffer(name)):
            differing.append(name)
    return differing


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
