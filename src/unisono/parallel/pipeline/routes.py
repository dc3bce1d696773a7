"""Which messages a stage receives and sends for one micro-batch: pure functions of a plan."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unisono.parallel.pipeline.messages import MessageLayout
from unisono.parallel.pipeline.placeholder import TensorLayout
from unisono.parallel.pipeline.stage_plan import PipelinePlan

__all__ = ["StageRoutes", "stage_routes"]


@dataclass(frozen=True, slots=True)
class StageRoutes:
    """The layouts of one stage's messages, by the other stage."""

    values_from: Mapping[int, MessageLayout[int]]
    """The inputs of a forward pass: values, and the state of the generator of the stage before if it draws numbers."""
    values_to: Mapping[int, MessageLayout[int]]
    gradients_from: Mapping[int, MessageLayout[Any]]
    """The inputs of a backward pass: gradients, by the number of a value or the name of a parameter."""
    gradients_to: Mapping[int, MessageLayout[Any]]


def stage_routes(plan: PipelinePlan, stage: int, parameters: Mapping[str, TensorLayout]) -> StageRoutes:
    """Return the messages of a stage.

    Args:
        plan: The plan of all stages.
        stage: The stage.
        parameters: The layouts of all parameters, by name.
    """
    values = _values(plan)
    gradients = _gradients(plan, parameters)
    return StageRoutes(
        values_from={source: layout for (source, target), layout in values.items() if target == stage},
        values_to={target: layout for (source, target), layout in values.items() if source == stage},
        gradients_from={source: layout for (source, target), layout in gradients.items() if target == stage},
        gradients_to={target: layout for (source, target), layout in gradients.items() if source == stage},
    )


def _values(plan: PipelinePlan) -> dict[tuple[int, int], MessageLayout[int]]:
    entries: dict[tuple[int, int], dict[int, TensorLayout]] = defaultdict(dict)
    for transfer in plan.transfers:
        for target in transfer.targets:
            entries[transfer.source, target][transfer.value] = plan.program.values[transfer.value].layout
    last_draw = max((stage.stage for stage in plan.stages if stage.draws), default=0)
    state_goes = {(target - 1, target) for target in range(1, last_draw + 1)}
    return {
        pair: MessageLayout(entries[pair], has_random_state=pair in state_goes)
        for pair in sorted(entries.keys() | state_goes)
    }


def _gradients(plan: PipelinePlan, parameters: Mapping[str, TensorLayout]) -> dict[tuple[int, int], MessageLayout[Any]]:
    entries: dict[tuple[int, int], dict[Any, TensorLayout]] = defaultdict(dict)
    for transfer in plan.transfers:
        if transfer.requires_grad:
            for source in transfer.targets:
                entries[source, transfer.gradient_target(source)][transfer.value] = plan.program.values[
                    transfer.value
                ].layout
    for name, users in plan.parameter_stages.items():
        for target, source in itertools.pairwise(users):
            entries[source, target][name] = parameters[name]
    return {pair: MessageLayout(found, are_gradients=True) for pair, found in sorted(entries.items())}
