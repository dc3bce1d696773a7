"""Makes the engines of a run whose state is divided over ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.consistency import ConsistencyCheck
from unisono.engine.host_tree_all_reduce import group_all_reduce
from unisono.engine.sharded.divided_sums_engine import DividedSumsEngine
from unisono.engine.sharded.division import DividedWeights, Division
from unisono.engine.sharded.sharded_engine import ShardedEngine
from unisono.engine.tree_all_reduce import MakeAllReduce
from unisono.engine.weight_writes import WeightWrites

__all__ = ["ShardedEngineFactory"]


class ShardedEngineFactory:
    """See `EngineFactory`.

    Args:
        world: The ranks.
        modules: The models.
        division: The units of the model.
        comparison: Compares what all ranks are about to do.
        virtual_ranks: Shares of a whole batch.
        overlap: If False, no gradient is added or taken before backward has ended.
        divides_sums: True to divide the sums of gradients after each leaf, which are dealt in turn then.
    """

    shares = False

    def __init__(
        self,
        world: World,
        modules: Sequence[nn.Module],
        division: Division,
        comparison: ConsistencyCheck,
        *,
        virtual_ranks: int,
        overlap: bool,
        divides_sums: bool = False,
    ) -> None:
        self._world, self._modules, self._division = world, modules, division
        self._virtual_ranks, self._overlap = virtual_ranks, overlap
        self._make = DividedSumsEngine if divides_sums else ShardedEngine
        self._made: list[ShardedEngine] = []
        self.comparison = comparison

    @property
    def weights(self) -> WeightWrites:
        """Writes values into the models between steps."""
        return DividedWeights(self._division)

    @property
    def all_reduce(self) -> MakeAllReduce:
        """Makes the all-reduce of a small vector."""
        return partial(group_all_reduce, self._world, None)

    def engine(self, optimizer: Optimizer) -> ShardedEngine:
        """Make the engine of an optimizer. Every rank must call it, in the same order."""
        made = self._make(
            optimizer,
            self._modules,
            self._world,
            self._division,
            virtual_ranks=self._virtual_ranks,
            overlap=self._overlap,
        )
        self._made.append(made)
        return made

    def repair(self, dead: Collection[int]) -> bool:
        """Return False: what a dead rank had is nowhere else."""
        return False

    def close(self) -> None:
        """Release the models and optimizers."""
        for engine in self._made:
            engine.close()
