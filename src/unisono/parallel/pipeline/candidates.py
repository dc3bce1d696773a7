"""The places at which a stage could begin, for an automatic split. Start reading at `find_places`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from unisono.errors import CutError
from unisono.parallel.pipeline.blocks import is_called
from unisono.parallel.pipeline.forward_program import ForwardProgram
from unisono.parallel.pipeline.recorder import record
from unisono.parallel.pipeline.stage_plan import first_calls, plan_stages

__all__ = ["Places", "find_places", "layer_names"]

_DEEPEST = 100
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class Places(NamedTuple):
    """The blocks with which a stage could begin, in the order of their first calls."""

    names: tuple[str, ...]
    """The first one may not begin the first stage: that has what comes before, if anything does."""
    calls: tuple[int, ...]
    """The number of the first call of each."""
    program: ForwardProgram


def find_places(model: nn.Module, function: Callable[..., Any], inputs: Sequence[Any], *, stages: int) -> Places:
    """Return the places at which stages could begin: at layers of containers, and at parts of large modules.

    Args:
        model: The whole model.
        function: The forward pass with its loss, called with the model and the inputs.
        inputs: Those of a micro-batch.
        stages: The number of stages that there are to be.

    Raises:
        CutError: The model's own code reads numbers, or changes tensors in place, so that it cannot be cut at all.
    """
    depth = max((name.count(".") for name in layer_names(model, stages=stages)), default=0)
    while True:
        names = layer_names(model, stages=stages, depth=depth)
        try:
            program = record(model, function, inputs, starts=names)
            break
        except CutError:
            # The code of a module that was divided: perhaps it can be a block as a whole.
            if not depth:
                raise
            depth -= 1
    found = []
    for name in names:
        try:
            (call,) = first_calls(program, [name])
            plan_stages(program, [call])
        except CutError:
            continue
        found.append((call, name))
    begin = next((call.number for call in program.calls if not call.everywhere), 0)
    found = sorted(each for each in found if each[0] > begin)
    return Places(tuple(name for _, name in found), tuple(call for call, _ in found), program)


def layer_names(model: nn.Module, *, stages: int, depth: int = _DEEPEST) -> list[str]:
    """Return the layers in containers, and the parts of large modules, in the order in which they are registered.

    Args:
        model: The whole model.
        stages: The number of stages that there are to be: a module is large if it has half of a stage's share.
        depth: How many modules deep to look.
    """
    total = sum(parameter.numel() for parameter in model.parameters())
    return [*_layers(model, "", total / (2 * stages), depth)]


def _layers(module: nn.Module, name: str, limit: float, depth: int) -> Iterator[str]:
    """Yield the modules below a container, or below a module with more parameters than the limit, down to a depth."""
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if next(child.parameters(), None) is None:
            continue
        size = sum(parameter.numel() for parameter in child.parameters())
        inner = [each for each in child.children() if next(each.parameters(), None) is not None]
        if not is_called(child) or (inner and depth and (_has_layers(child) or size > limit)):
            yield from _layers(child, full, limit, max(0, depth - 1))
        else:
            yield full


def _has_layers(module: nn.Module) -> bool:
    """Return True if a module is, or has somewhere, a list of modules with parameters."""
    return any(
        isinstance(each, _CONTAINERS) and sum(next(c.parameters(), None) is not None for c in each.children()) > 1
        for each in module.modules()
    )
