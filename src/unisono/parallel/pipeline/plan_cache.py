"""Plans for the inputs that come: one for each set of shapes, types and modes, recorded when it is first seen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from unisono.errors import PathChangedError
from unisono.parallel.pipeline.blocks import find_blocks
from unisono.parallel.pipeline.leaves import described, flatten
from unisono.parallel.pipeline.placeholder import TensorLayout
from unisono.parallel.pipeline.recorder import record
from unisono.parallel.pipeline.stage import Stage
from unisono.parallel.pipeline.stage_plan import PipelinePlan, first_calls, plan_stages
from unisono.state.random import kept_generators

__all__ = ["PlanCache", "model_state", "signature"]


def model_state(model: nn.Module) -> Hashable:
    """Return what of a model's state its path depends on: the modes of modules, and which parameters are trained."""
    modes = tuple(module.training for module in model.modules())
    return modes, tuple(parameter.requires_grad for parameter in model.parameters())


def signature(state: Hashable, inputs: Sequence[Any]) -> Hashable:
    """Return what the path through the model's code may depend on, besides numbers in the inputs.

    Args:
        state: What `model_state` returned.
        inputs: The inputs: the layouts of tensors, and all else as it is.
    """
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return described(tuple(inputs)), state, autocast, torch.is_grad_enabled()


class PlanCache:
    """The plans of one model, one function's code, and set of cuts.

    Args:
        model: The whole model.
        starts: The submodules whose first call begins a stage, from the second stage on.
        layouts: Those of parameters whose memory has been given back, by name, as it is at the time.
        limit: How many plans are kept; the oldest goes first.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        starts: Sequence[str],
        layouts: Mapping[str, TensorLayout] = MappingProxyType({}),
        limit: int = 64,
    ) -> None:
        self._model = model
        self._starts = tuple(starts)
        self._layouts, self._limit = layouts, limit
        self._plans: dict[Hashable, list[PipelinePlan]] = {}

    def plan_for(self, function: Callable[..., Any], inputs: Sequence[Any], state: Hashable = None) -> PipelinePlan:
        """Return the plan for some inputs.

        The model's code may read numbers from inputs and take another path for other numbers. So a plan of such a model
        is tried first, without any block.

        Args:
            function: The forward pass with its loss.
            inputs: Its inputs, the same on all stages.
            state: What `model_state` has returned just before. None: it is called.

        Raises:
            CutError: The model cannot be cut so.
        """
        key = signature(model_state(self._model) if state is None else state, inputs)
        for plan in self._plans.get(key, ()):
            if not plan.program.reads_numbers or self._fits(plan, function, inputs):
                return plan
        program = record(self._model, function, inputs, starts=self._starts, layouts=self._layouts)
        plan = plan_stages(program, first_calls(program, self._starts))
        if sum(map(len, self._plans.values())) >= self._limit:
            del self._plans[next(iter(self._plans))]
        self._plans.setdefault(key, []).append(plan)
        return plan

    def _fits(self, plan: PipelinePlan, function: Callable[..., Any], inputs: Sequence[Any]) -> bool:
        # On a copy of the containers, so that nothing which their code counts or assigns happens twice.
        blocks = find_blocks(self._model, self._starts)
        memo: dict[int, Any] = {id(block): block for block in blocks.values()}
        memo |= {id(parameter): parameter for parameter in self._model.parameters()}
        in_blocks = {id(buffer) for block in blocks.values() for buffer in block.buffers()}
        memo |= {id(one): one.detach().clone() for one in self._model.buffers() if id(one) not in in_blocks}
        path = Stage(plan, None, copy.deepcopy(self._model, memo), starts=self._starts)
        leaves, build = flatten(tuple(inputs))
        own_inputs = build(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        try:
            with kept_generators():
                path.forward(function, own_inputs, {})
        except PathChangedError:
            return False
        return True
