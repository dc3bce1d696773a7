"""A user's optimizer whose state is divided over ranks: each rank has that of its pieces, and updates these.

While a run is divided, the user's optimizer has no state: it is here. It is brought together, in the user's optimizer,
where it is to be saved or seen as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.engine.norm import in_memory_order
from unisono.engine.optimizer_placement import placed
from unisono.engine.sharded.unit import ShardedUnit
from unisono.engine.shared.partition import Piece
from unisono.engine.shared.sharded_optimizer import ShardedOptimizer

__all__ = ["OptimizerPiece", "OptimizerShards"]


class OptimizerPiece(NamedTuple):
    """A piece of a parameter that this rank updates."""

    name: str
    """The name of the parameter."""
    shape: torch.Size
    """The shape of the parameter."""
    strides: tuple[int, ...]
    """The order of its elements in memory, in which a piece is cut."""
    start: int
    stop: int
    state: Mapping[str, Any]
    """The optimizer's state of the piece."""

    def has_element_of_each(self, value: Any) -> bool:
        """Return True for a tensor of the state that has an element for each one of the piece, such as an average."""
        return isinstance(value, Tensor) and bool(value.dim()) and list(value.shape) == [self.stop - self.start]


class OptimizerShards:
    """This rank's pieces of the parameters of one optimizer, with their state.

    Args:
        optimizer: The user's optimizer, which treats each element independently.
        units: The units of the model.
        names: The name of each parameter, by its identity.
    """

    def __init__(self, optimizer: Optimizer, units: Sequence[ShardedUnit], names: Mapping[int, str]) -> None:
        self._optimizer, self._units, self._names = optimizer, units, names
        self._strides = {
            id(p): strides for unit in units for p, strides in zip(unit.parameters, unit.strides, strict=True)
        }
        self._known: list[int] = []
        self._parameters: list[Tensor] = []
        self.numbers: list[tuple[int, int]] = []
        """For each piece, the number of its unit and its number in the unit."""
        self.sharded: ShardedOptimizer
        self._build()

    def _build(self) -> None:
        """Find the pieces of the parameters that the optimizer has now; their state stays."""
        known = [id(p) for group in self._optimizer.param_groups for p in group["params"]]
        if known == self._known:
            return
        state = self.sharded.state if self._known else None
        self._known, of_optimizer = known, {*known}
        self._parameters, self.numbers = [], []
        pieces, places = [], []
        for u, unit in enumerate(self._units):
            index = {}
            for i, p in enumerate(unit.parameters):
                if id(p) in of_optimizer:
                    index[i] = len(self._parameters)
                    self._parameters.append(p)
            for k, (piece, place) in enumerate(zip(unit.pieces, unit.places, strict=True)):
                if piece.parameter in index:
                    pieces.append(Piece(index[piece.parameter], piece.start, piece.stop))
                    places.append(place)
                    self.numbers.append((u, k))
        self.sharded = ShardedOptimizer(self._optimizer, self._parameters, pieces, places)
        if state is not None:
            self.sharded.state.update(state)

    def step(self, gradients: Mapping[tuple[int, int], Tensor], used: set[int], found_inf: Tensor | None) -> None:
        """Update this rank's pieces.

        Args:
            gradients: The gradient of each piece, by `numbers`.
            used: The identities of the parameters that have one.
            found_inf: See `ShardedOptimizer.step`.
        """
        self._build()
        own = [gradients.get(number) for number in self.numbers]
        of_parameters = [id(p) in used for p in self._parameters]
        self.sharded.step(self._optimizer.param_groups, own, of_parameters, found_inf)

    def take(self) -> None:
        """Take this rank's part of the state from the user's optimizer, which is whole."""
        self._build()
        states = []
        for piece in self.sharded.pieces:
            p = self._parameters[piece.parameter]
            whole = self._optimizer.state.get(p, {})
            states.append({key: _part(value, p, piece, self._strides[id(p)]) for key, value in whole.items()})
        self.load(states)

    def pieces(self) -> list[OptimizerPiece]:
        """Return this rank's pieces, with the state that they have."""
        self._build()
        found = []
        for piece, place in zip(self.sharded.pieces, self.sharded.places, strict=True):
            p = self._parameters[piece.parameter]
            name, strides = self._names[id(p)], self._strides[id(p)]
            state = self.sharded.state.get(place, {})
            found.append(OptimizerPiece(name, p.shape, strides, piece.start, piece.stop, state))
        return found

    def load(self, states: Sequence[dict[str, Any]]) -> None:
        """Replace the state of this rank's pieces, in the order of `pieces`. An empty one stands for none.

        Tensors may be on any device.
        """
        self.sharded.state.clear()
        self.sharded.forget()
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for piece, place, state in zip(self.sharded.pieces, self.sharded.places, states, strict=True):
            if state:
                group = groups[id(self._parameters[piece.parameter])]
                self.sharded.state[place] = {
                    key: placed(key, value, place, group) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }

    def clear(self) -> None:
        """Drop the state in the user's optimizer."""
        for p in self._parameters:
            self._optimizer.state.pop(p, None)

    def own_state(self) -> dict[str, dict[str, Any]]:
        """Return the state of this rank's pieces by parameter: where the piece begins and ends, and its values."""
        return {
            self._names[id(self._parameters[piece.parameter])]: {
                "start": piece.start,
                "stop": piece.stop,
                "shape": list(place.shape),
                "state": dict(state),
            }
            for piece, place in zip(self.sharded.pieces, self.sharded.places, strict=True)
            if (state := self.sharded.state.get(place))
        }

    def show(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Put what `own_state` of a rank has returned into the user's optimizer, a part of the whole state."""
        parameters = {self._names[id(p)]: p for p in self._parameters}
        for name, part in found.items():
            p = parameters[name]
            whole = self._optimizer.state[p]
            for key, value in part["state"].items():
                if not isinstance(value, Tensor) or not value.dim() or list(value.shape) != part["shape"]:
                    if part["start"] == 0:  # the same in all pieces
                        whole[key] = value.clone() if isinstance(value, Tensor) else value
                    continue
                if key not in whole:
                    strides = self._strides[id(p)]
                    whole[key] = torch.empty_strided(p.shape, strides, dtype=value.dtype, device=value.device)
                vector = whole[key].as_strided((p.numel(),), (1,))
                vector[part["start"] : part["stop"]].copy_(value)


def _part(value: Any, parameter: Tensor, piece: Piece, strides: tuple[int, ...]) -> Any:
    if not isinstance(value, Tensor):
        return value
    if not value.dim() or value.shape != parameter.shape:
        return value.clone()
    return in_memory_order(value, strides)[piece.start : piece.stop].clone()
