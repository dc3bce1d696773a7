"""The update of tables whose rows are kept twice: a rank that has missed the end of a step can make it after all.

Before any rank writes, all wait until each has its gradients. So if one rank has ended a step when another one dies,
the others have what they need to end it; and if none has, none has written a row. Start reading at `KeptUpdates.agree`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from unisono.collectives.freed_wait import run_collective
from unisono.collectives.world import World
from unisono.embedding.row_optimizers import rule_named
from unisono.embedding.table_optimizer import TableOptimizer
from unisono.errors import UnisonoError

__all__ = ["KeptUpdates"]

_NONE = -1
"""Stands for the number of updates of a table that has had none, and so has no state."""


class KeptUpdates:
    """The latest update of some tables, for one run.

    Args:
        world: The ranks.
        tables: The weights of the tables, the same on all ranks.
    """

    def __init__(self, world: World, tables: Sequence[Tensor]) -> None:
        self._world, self._tables = world, tables
        self._optimizers: list[TableOptimizer] = []
        self._gradients: dict[int, Tensor] = {}

    def agree(self, optimizers: Iterable[Optimizer]) -> None:
        """Note p.grad of tables, and wait until all ranks have theirs. Every rank must call it before weights change.

        Memory: the gradients, until the next step. Traffic: an all-reduce of 8 bytes.

        Args:
            optimizers: Those that are about to make a step.
        """
        self._optimizers = [each for each in optimizers if isinstance(each, TableOptimizer)]
        self._gradients = {id(p): p.grad for p in self._tables if p.grad is not None}
        run_collective(dist.all_reduce, torch.zeros(1, dtype=torch.int64), group=self._world.group)

    def forget(self) -> None:
        """Forget the gradients: another step begins."""
        self._optimizers, self._gradients = [], {}

    def counts(self, optimizers: Iterable[Optimizer]) -> list[int]:
        """Return how many updates each table has had."""
        return [_count(p, optimizers) for p in self._tables]

    def make_up(self, wanted: Sequence[int], optimizers: Iterable[Optimizer]) -> None:
        """Make the updates that another rank has made and this one has not.

        Args:
            wanted: What `counts` returns on that rank.
            optimizers: Those of the run.

        Raises:
            UnisonoError: This rank does not have the gradients.
        """
        optimizers = [*optimizers]
        behind = [p for p, count in zip(self._tables, wanted, strict=True) if _count(p, optimizers) != count]
        if not behind:
            return
        if any(id(p) not in self._gradients for p in behind):
            raise UnisonoError("a rank has made an update of tables for which this one has no gradients")
        for p in self._tables:
            p.grad = self._gradients[id(p)] if any(p is each for each in behind) else None
        try:
            for optimizer in self._optimizers:
                optimizer.step()
        finally:
            for p in self._tables:
                p.grad = None
        if self.counts(optimizers) != [*wanted]:
            raise UnisonoError(f"tables have had {self.counts(optimizers)} updates here, and {[*wanted]} elsewhere")

    def make_state(self, wanted: Sequence[int], optimizers: Iterable[Optimizer]) -> None:
        """Make the state of the tables that have one on another rank; see `make_up`."""
        have_state = {id(p) for p, count in zip(self._tables, wanted, strict=True) if count != _NONE}
        for each in optimizers:
            if isinstance(each, TableOptimizer):
                for group in each.param_groups:
                    for p in group["params"]:
                        if id(p) in have_state:
                            each.make_state(p, rule_named(group["rule"]))


def _count(p: Tensor, optimizers: Iterable[Optimizer]) -> int:
    for each in optimizers:
        if p in each.state:
            return int(each.state[p]["step"])
    return _NONE
