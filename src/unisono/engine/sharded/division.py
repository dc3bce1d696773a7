"""A model divided over ranks: its units, what is exchanged of them, and the state of the optimizers that train it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.collectives.world import World
from unisono.engine.norm import in_memory_order
from unisono.engine.sharded.exchange import UnitExchange
from unisono.engine.sharded.grid import ShardGrid
from unisono.engine.sharded.optimizer_shards import OptimizerShards
from unisono.engine.sharded.unit import ShardedUnit
from unisono.engine.shared.partition import Piece
from unisono.machine import give_memory_back

__all__ = ["DividedWeights", "Division"]


class Division:
    """The state of a run on this rank: whole, or this rank's part of it.

    Args:
        world: The ranks; one alone where its parts are kept in memory of the CPU.
        units: The units of the model, the same on all ranks.
        optimizers: The optimizers of the run.
        grid: This rank's place. Some units may have another one, in which each rank keeps all weights.
        is_whole: False if the units are apart already, since the model was built in parts: then the run never becomes
            whole on all ranks by itself.
    """

    def __init__(
        self,
        world: World,
        units: Sequence[ShardedUnit],
        optimizers: Sequence[Optimizer],
        grid: ShardGrid,
        *,
        is_whole: bool = True,
    ) -> None:
        self._world, self.units, self.grid = world, units, grid
        self.exchange = UnitExchange(world, units, grid)
        self.keeps_weights = all(unit.keeps_weights for unit in units)
        """True if each rank has the values of all parameters at any time."""
        self.whole: Literal["nowhere", "main", "everywhere"] = "everywhere"
        """Which ranks have the whole state. Equal on all of them. "main" is rank 0, whose copy may be dropped."""
        names = {id(p): name for unit in units for name, p in zip(unit.names, unit.parameters, strict=True)}
        self._optimizers = optimizers
        self._shards = {id(optimizer): OptimizerShards(optimizer, units, names) for optimizer in optimizers}
        self.beside: list[Division] = []
        """Those of models that have copies of the parameters, such as averages: they come together when these do."""
        self.stays_divided = not is_whole
        """True if no rank is expected to have memory for the whole."""
        if not is_whole:
            for shards in self._shards.values():
                shards.take()
                shards.clear()
            self.whole = "nowhere"

    @property
    def is_whole(self) -> bool:
        """True if this rank has the whole state."""
        return self.whole == "everywhere" or (self.whole == "main" and self._world.rank == 0)

    @property
    def has_weights(self) -> bool:
        """True if this rank has the values of all parameters, at any time."""
        return self.is_whole or self.keeps_weights

    def shards_of(self, optimizer: Optimizer) -> OptimizerShards:
        """Return the state of an optimizer."""
        return self._shards[id(optimizer)]

    def divide(self) -> None:
        """Give back the memory of what other ranks have. Every rank must call it; local."""
        if self.whole == "nowhere":
            return
        keep = self.whole == "everywhere"
        for optimizer in self._optimizers:
            if keep:
                self._shards[id(optimizer)].take()
            self._shards[id(optimizer)].clear()
        for unit in self.units:
            if not unit.keeps_weights:
                if keep:
                    unit.keep()
                if unit.is_together:
                    unit.divide()
        self.whole = "nowhere"
        for each in self.beside:
            each.divide()
        give_memory_back()

    def begin_divided(self) -> None:
        """Go on with the parts that were read into `ShardedUnit.held_places` and `OptimizerShards.load`. Local.

        Where each rank keeps all weights, they were read into the parameters.
        """
        for optimizer in self._optimizers:
            self._shards[id(optimizer)].clear()
        for unit in self.units:
            if not unit.keeps_weights:
                unit.divide()
        self.whole = "nowhere"
        for each in self.beside:
            each.begin_divided()
        give_memory_back()

    def become_whole(self) -> None:
        """Bring all weights of a run that has just begun to all ranks, to be written there. Every rank must call it.

        Memory and traffic: see `join_weights`.
        """
        if self.whole != "everywhere":
            self.join_weights(everywhere=True)
            self.note_whole("everywhere")

    def note_whole(self, where: Literal["main", "everywhere"]) -> None:
        """Note where the whole state is now. Every rank must call it; local."""
        self.whole = where
        for each in self.beside:
            each.note_whole(where)

    def join_weights(self, *, everywhere: bool) -> None:
        """Bring all parameters together on rank 0, or on all ranks. Every rank must call it.

        Memory: the weights there. Traffic: each rank's part to each rank of its replica that lacks it.
        """
        wanted = range(self._world.size) if everywhere else (0,)
        missing = [rank for rank in wanted if not (self.whole == "main" and rank == 0)]
        for number, unit in enumerate(self.units):
            if not unit.keeps_weights:
                self.exchange.gather(number, missing)
        for each in self.beside:
            each.join_weights(everywhere=everywhere)


class DividedWeights:
    """Writes values into the models of a divided run: into the parts of ranks, where these are not whole.

    Args:
        division: The state of the run.
    """

    def __init__(self, division: Division) -> None:
        self._division = division

    @contextmanager
    def writing(self) -> Iterator[Callable[[Tensor, Tensor], None]]:
        """See `WeightWrites`."""
        division = self._division
        places: dict[int, tuple[tuple[int, ...], list[tuple[Piece, Tensor]]]] = {}
        if not division.has_weights:
            for unit in (unit for each in (division, *division.beside) for unit in each.units):
                held: list[list[tuple[Piece, Tensor]]] = [[] for _ in unit.parameters]
                for piece, place in unit.held_places():
                    held[piece.parameter].append((piece, place))
                places.update(zip(unit.placeholders(), zip(unit.strides, held, strict=True), strict=True))

        def write(tensor: Tensor, value: Tensor) -> None:
            found = places.get(tensor.untyped_storage()._cdata)
            if found is None:
                tensor.copy_(value)
                return
            strides, own = found
            vector = in_memory_order(value, strides)
            for piece, place in own:
                place.copy_(vector[piece.start : piece.stop])

        with torch.no_grad():
            yield write
