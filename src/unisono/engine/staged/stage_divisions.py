"""The optimizers' state of a rank's stages, divided over the ranks that compute the same stage, one of each replica.

Each of them has the weights of the stage, as with `zero=1` of a model that is not cut: `engine.sharded` does the work,
with the ranks of a stage in the place of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.engine.model_contents import plain_name
from unisono.engine.sharded.division import Division
from unisono.engine.sharded.grid import ShardGrid
from unisono.engine.sharded.unit import ShardedUnit
from unisono.engine.staged.stage_map import StageOwnership
from unisono.engine.staged.stage_ranks import StageRanks

__all__ = ["StageDivisions"]

_LEAST_NBYTES = 4 * 2**20
"""The size of a unit whose gradients are summed at once; below, the number of messages would decide."""
_MOST_UNITS = 16
"""The number of units of a stage whose size is more than that, which bounds what their sums take besides."""


class StageDivisions:
    """The state of the optimizers on this rank: that of its stages, or this rank's part of it.

    Args:
        ranks: The place of this rank; there are several replicas.
        ownership: Who has which parameter.
        model: The model.
        optimizers: The optimizers of the run.
    """

    def __init__(
        self, ranks: StageRanks, ownership: StageOwnership, model: nn.Module, optimizers: Sequence[Optimizer]
    ) -> None:
        assert ranks.replicas > 1
        self._ranks, self._ownership, self._model = ranks, ownership, model
        self.optimizers = optimizers
        self.of_stage: dict[int, Division] = {}
        """By stage of this rank; empty until the first step, which finds what stages have."""

    def divide(self) -> None:
        """Give back the memory of what other ranks have, once it is known who has what. Local."""
        if not self.of_stage:
            self.of_stage = {stage: self._division(stage) for stage in self._ranks.own_stages}
        for division in self.of_stage.values():
            division.divide()

    def _division(self, stage: int) -> Division:
        known, column = self._ownership.map, self._ranks.columns[stage]
        assert known is not None
        own = {plain: p for n, p in self._model.named_parameters() if known.owner(plain := plain_name(n)) == stage}
        grid = ShardGrid(rank=column.rank, ranks=column.size, replicas=column.size)
        units = [ShardedUnit(next(iter(members)), members, grid) for members in _units_of(own)]
        return Division(column, units, self.optimizers, grid)


def _units_of(parameters: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the parameters in units: those that follow each other, until they have the size of one."""
    nbytes = {name: p.numel() * p.element_size() for name, p in parameters.items()}
    size = max(_LEAST_NBYTES, sum(nbytes.values()) // _MOST_UNITS)
    units: list[dict[str, Tensor]] = []
    filled = size
    for name, p in parameters.items():
        if filled >= size:
            units.append({})
            filled = 0
        units[-1][name] = p
        filled += nbytes[name]
    return units
