"""The state of a rank's stages, divided over the ranks that compute the same stage, one of each replica.

`engine.sharded` does the work, with the ranks of a stage in the place of all ranks. Each of them has the weights of the
stage, as with `zero=1` of a model that is not cut; or weights are divided as well, and come together while
micro-batches go through the stage. Parameters that several stages use stay whole in either case: they are sent from
stage to stage.
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
    """The state of this rank's stages: all of it, or this rank's part.

    Args:
        ranks: The place of this rank; there are several replicas.
        ownership: Who has which parameter.
        model: The model.
        optimizers: The optimizers of the run; none for a copy of the model.
        divides_weights: True to divide weights and gradients, too.
    """

    def __init__(
        self,
        ranks: StageRanks,
        ownership: StageOwnership,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        divides_weights: bool,
    ) -> None:
        assert ranks.replicas > 1
        self._ranks, self._ownership, self._model = ranks, ownership, model
        self.optimizers, self.divides_weights = optimizers, divides_weights
        self.of_stage: dict[int, Division] = {}
        """By stage of this rank; empty until the first step, which finds what stages have."""
        self._copies: list[StageDivisions] = []

    def of(self, model: nn.Module) -> StageDivisions:
        """Return the divisions of the model or of a copy of it, such as an average, which are alike.

        A copy comes together and apart with the model. It is for divided weights alone.
        """
        known = [each for each in (self, *self._copies) if each._model is model]
        if known:
            return known[0]
        assert not self.of_stage
        made = StageDivisions(self._ranks, self._ownership, model, (), divides_weights=self.divides_weights)
        self._copies.append(made)
        return made

    def divide(self) -> None:
        """Give back the memory of what other ranks have, once it is known who has what. Local."""
        if not self.of_stage:
            for each in (self, *self._copies):
                each.of_stage = {stage: each._division(stage) for stage in self._ranks.own_stages}
            for stage, division in self.of_stage.items():
                division.beside += [each.of_stage[stage] for each in self._copies]
        for division in self.of_stage.values():
            division.divide()

    def pairs(self, copy: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's parts of the weights of a copy that are apart, each with that of the model."""
        own = [unit for division in self.of_stage.values() for unit in division.units]
        copies = [unit for division in self.of(copy).of_stage.values() for unit in division.units]
        return [
            (averaged, value)
            for copied, unit in zip(copies, own, strict=True)
            if not unit.keeps_weights
            for (_, averaged), (_, value) in zip(copied.held_places(), unit.held_places(), strict=True)
        ]

    @property
    def apart(self) -> set[int]:
        """The identities of the parameters of which this rank has no more than a part now."""
        units = [unit for division in self.of_stage.values() for unit in division.units if not division.has_weights]
        return {id(p) for unit in units if not unit.keeps_weights for p in unit.parameters}

    def _division(self, stage: int) -> Division:
        known, column = self._ownership.map, self._ranks.columns[stage]
        assert known is not None
        divided, sent = dict[str, Tensor](), dict[str, Tensor]()
        for name, p in self._model.named_parameters():
            if known.owner(plain := plain_name(name)) == stage:
                stays = not self.divides_weights or len(known.parameters.get(plain, ())) > 1
                (sent if stays else divided)[plain] = p
        whole = ShardGrid(rank=column.rank, ranks=column.size, replicas=column.size)
        parts = ShardGrid(rank=column.rank, ranks=column.size)
        units = [
            ShardedUnit(next(iter(members)), members, grid)
            for grid, own in ((parts, divided), (whole, sent))
            for members in _units_of(own)
        ]
        return Division(column, units, self.optimizers, parts if self.divides_weights else whole)


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
