"""Which stage has which parameters and buffers, by a plan: pure functions of it and of the names in the model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from torch import nn

from unisono.engine.model_contents import member_name
from unisono.engine.staged import StageMap
from unisono.parallel.pipeline.blocks import find_blocks
from unisono.parallel.pipeline.stage_plan import PipelinePlan

__all__ = ["map_stages"]


def map_stages(plan: PipelinePlan, model: nn.Module, starts: Sequence[str]) -> StageMap:
    """Return which stages use each parameter, and which one may write each buffer.

    A block that the plan does not call has the stage of its place among the other blocks. A buffer outside of blocks
    belongs to the first stage that writes it.

    Args:
        plan: A plan of the model.
        model: The whole model.
        starts: The submodules with which stages begin, from the second stage on.
    """
    begins = [stage.begin for stage in plan.stages[1:]]
    stage_of_block: dict[str, int] = {}
    in_order = 0
    for name in find_blocks(model, starts):
        if name in starts:
            in_order = 1 + list(starts).index(name)
        first = plan.program.first_call_of(name)
        stage_of_block[name] = in_order if first is None else bisect_right(begins, first)
    written: dict[str, int] = {}
    for call in plan.program.calls:
        for name in call.written_buffers:
            written.setdefault(member_name(*_split(name)), bisect_right(begins, call.number))
    parameters, buffers = {}, {}
    for path, module in model.named_modules():
        stage = next((stage_of_block[each] for each in _ancestors(path) if each in stage_of_block), None)
        for name in module._buffers:
            full = member_name(path, name)
            buffers[full] = written.get(full, 0) if stage is None else stage
        for name, parameter in module._parameters.items():
            if parameter is not None:
                parameters[member_name(path, name)] = (stage or 0,)
    used = {member_name(*_split(name)): stages for name, stages in plan.parameter_stages.items()}
    names = [member_name(*_split(name)) for name, _ in model.named_parameters()]
    return StageMap({name: used.get(name, parameters[name]) for name in names}, buffers)


def _split(name: str) -> tuple[str, str]:
    path, _, last = name.rpartition(".")
    return path, last


def _ancestors(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts), 0, -1)]
