"""The mark that `build` leaves in a model of which each rank has only a part, and its lookup by a Trainer."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn

from unisono.engine.sharded import ShardedUnit, ShardGrid
from unisono.errors import UnisonoError
from unisono.parallel.call_check import ChecksCalls
from unisono.parallel.sharding.shard import Shard

__all__ = ["BuiltParts", "built_parts", "copy_built"]


class BuiltParts:
    """The units of a model that was divided when it was built. It is kept as a hook of the model, which checks calls.

    Args:
        shard: The settings with which the model was built.
        grid: This rank's place.
        units: The units, which are apart.
        device: Where the model computes.
    """

    def __init__(self, shard: Shard, grid: ShardGrid, units: Sequence[ShardedUnit], device: torch.device) -> None:
        self.shard, self.grid, self.units, self.device = shard, grid, units, device
        self._owner: ref[ChecksCalls] | None = None

    def owned_by(self, owner: ChecksCalls) -> None:
        """Let the present run decide when the model may be called."""
        self._owner = ref(owner)

    def check_unchanged(self, model: nn.Module) -> None:
        """Check that the model has the parameters with which it was built.

        Raises:
            ValueError: One was added, replaced or written to.
        """
        apart = {key for unit in self.units for key in unit.placeholders()}
        changed = next((n for n, p in model.named_parameters() if not _is_apart(p, apart)), None)
        if changed is not None:
            raise ValueError(
                f"parameter {changed!r} was added or changed after unisono.parallel.build, where each rank has a part "
                "of the model alone: do that within the function that it is given"
            )

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Refuse a call of the model while its parts cannot come together.

        Raises:
            UnisonoError: No Trainer or `shard` has it, or that is not computing.
        """
        owner = None if self._owner is None else self._owner()
        if owner is None:
            raise UnisonoError(
                f"{type(module).__name__} was built by unisono.parallel.build, so each rank has a part of its "
                "parameters alone: give it to Trainer(parallel=...) or unisono.parallel.shard, and call it in their "
                "steps and evaluations"
            )
        owner.check_call(module)

    def __reduce__(self) -> NoReturn:
        raise UnisonoError(
            "a model that was built by unisono.parallel.build cannot be copied or pickled, since each rank has a part "
            "of its parameters alone: trainer.export writes the whole into a file, and within whole() of "
            "unisono.parallel.shard its state_dict is whole"
        )


def copy_built(model: nn.Module, built: BuiltParts) -> nn.Module:
    """Return a copy of a model that was divided when it was built, with this rank's part of each parameter.

    Memory: the part.

    Args:
        model: The model.
        built: Its parts.
    """
    copies: dict[int, nn.Parameter] = {}
    units = []
    for unit in built.units:
        for p, strides in zip(unit.parameters, unit.strides, strict=True):
            memory = torch.empty_strided(p.shape, strides, dtype=p.dtype, device=built.device)
            memory.untyped_storage().resize_(0)
            copies[id(p)] = nn.Parameter(memory, requires_grad=p.requires_grad)
        own = {name: copies[id(p)] for name, p in zip(unit.names, unit.parameters, strict=True)}
        on_cpu = built.shard.offloads(built.device)
        units.append(copied := ShardedUnit(unit.name, own, built.grid, on_cpu=on_cpu))
        copied.held.copy_(unit.held)
        copied.divide()
    return copy.deepcopy(model, {**copies, id(built): BuiltParts(built.shard, built.grid, units, built.device)})


def _is_apart(parameter: Tensor, apart: Collection[int]) -> bool:
    """Return True if a parameter has no values, as its unit has left it; torch lets `fill_` and `zero_` write there."""
    if parameter.untyped_storage()._cdata not in apart:
        return False
    shown = parameter.detach().as_strided((), ())
    return not parameter.is_floating_point() or bool(shown.isnan())


def built_parts(model: nn.Module) -> BuiltParts | None:
    """Return the parts of a model that `build` has divided; None for any other."""
    return next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, BuiltParts)), None)
