"""The optimizer's state in shared memory: each rank writes its pieces, and all see it whole, in the user's optimizer.

A step may create state: each rank creates the state of its pieces. After such a step the ranks send each other a
description of the new state, move it to shared memory, and put it into `optimizer.state`, as any optimizer does. State
that a user or a checkpoint puts there instead is adopted before the next update.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from unisono.engine.norm import dense_strides, in_memory_order
from unisono.engine.shared.sharded_optimizer import ShardedOptimizer
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.errors import UnisonoError
from unisono.machine import give_memory_back
from unisono.shm.segment import ALIGNMENT, aligned

__all__ = ["SharedState", "StateEntry", "copy_state"]


class _Kind(NamedTuple):
    """The kind of an entry in a parameter's state."""

    what: str
    """"like": a value for each element. "tensor": a tensor of another shape, or a number for all pieces. "number": a
    plain number. "constant": a value that does not change."""
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    constant: Any = None


class StateEntry(NamedTuple):
    """An entry in a parameter's state, and its place in shared memory."""

    kind: _Kind
    value: Any
    """The value in the user's optimizer."""
    vector: Tensor | None
    """The shared memory, as a vector in memory order; None for a constant."""


class SharedState:
    """The state of one optimizer, over the pieces of a `ShardedOptimizer`.

    If the place of a piece is the parameter itself, its owner may make state of any shape. Other ranks may have such a
    piece, too, as guests: they get its state once that is shared, and write to the same memory.

    Args:
        runtime: Allocates the memory.
        names: The names of all parameters.
        parameters: All parameters.
        sharded: The optimizer of this rank's pieces.
        guests: The numbers of the parameters of which this rank is a guest.
        in_files: By the number of a table in a file, the memory for its state there, which all ranks map.
    """

    def __init__(
        self,
        runtime: SharedRuntime,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        sharded: ShardedOptimizer,
        guests: Collection[int] = (),
        *,
        in_files: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        self._runtime, self._names, self._parameters = runtime, names, parameters
        self._sharded, self._guests, self._in_files = sharded, guests, in_files or {}
        self._whole = [
            (piece.parameter, place)
            for piece, place in zip(sharded.pieces, sharded.places, strict=True)
            if place is parameters[piece.parameter]
        ]
        self._entries: list[dict[str, StateEntry]] = [{} for _ in parameters]
        self._settled = [0] * len(sharded.pieces)
        """The number of entries in the state of each piece that all ranks see."""
        self._published: list[dict[str, Any]] = [{} for _ in parameters]
        self._seen: list[Any] | None = None
        """All values in the user's optimizer when it last had no new ones, for a quick check; None after a change."""
        self._former: dict[int, dict[str, Any] | None] = {}
        """The state of parameters in the user's optimizer from before `settle`, until `keep`."""
        self._adopted: set[int] = set()
        self._has_numbers = False

    def adopt(self, optimizer: Optimizer) -> bool:
        """Adopt state in the user's optimizer that this class did not put there. Return True if there was any.

        Local: the state is the same on all ranks.
        """
        present = [*chain.from_iterable(map(dict.values, optimizer.state.values()))]
        seen = self._seen
        if seen is not None and len(present) == len(seen) and all(map(is_, present, seen)):
            return False
        changed = set()
        for i, (p, published) in enumerate(zip(self._parameters, self._published, strict=True)):
            state = optimizer.state.get(p)
            if state is None or not state:
                if published:
                    changed.add(i)
            elif len(state) != len(published) or not all(map(is_, state.values(), published.values())):
                changed.add(i)
        self._seen = None if changed else present
        if not changed:
            return False
        self._adopted |= changed
        self._sharded.forget()
        for piece, place in zip(self._sharded.pieces, self._sharded.places, strict=True):
            if piece.parameter in changed:
                p = self._parameters[piece.parameter]
                self._sharded.state.pop(place, None)
                if piece.parameter not in self._guests and (state := optimizer.state.get(p)):
                    self._sharded.state[place] = {
                        key: value
                        if self._is_in_file(piece.parameter, key, value)
                        else self._own_part(value, p, place, piece.start, piece.stop)
                        for key, value in state.items()
                    }
        return True

    def is_settled(self) -> bool:
        """Return True if all state that this rank has made is in memory that all ranks see."""
        if self._adopted:
            return False
        state = self._sharded.state
        return [len(state.get(place, ())) for place in self._sharded.places] == self._settled

    def is_shared(self, index: int) -> bool:
        """Return True if a parameter has state, and all of it is in memory that all ranks see."""
        return bool(self._entries[index]) and index not in self._adopted

    def settle(self, optimizer: Optimizer) -> None:
        """Move new state to shared memory. Every rank must call it, and pass a barrier before the state is read."""
        found: dict[int, dict[str, _Kind]] = {i: {} for i in self._adopted}
        for piece, place in zip(self._sharded.pieces, self._sharded.places, strict=True):
            kinds = {
                key: self._kind(value, place, piece.parameter, key)
                for key, value in self._sharded.state.get(place, {}).items()
            }
            if piece.parameter in found or kinds.keys() != self._entries[piece.parameter].keys():
                found[piece.parameter] = kinds
        everyone: dict[int, dict[str, _Kind]] = {}
        for of_rank in self._runtime.world.gather(found):
            for index, kinds in of_rank.items():
                everyone[index] = kinds or everyone.get(index, {})
        self._build(everyone)
        self._sharded.forget()
        for piece, place in zip(self._sharded.pieces, self._sharded.places, strict=True):
            if piece.parameter not in everyone:
                continue
            if piece.parameter in self._guests:
                self._sharded.state[place] = {k: entry.value for k, entry in self._entries[piece.parameter].items()}
            else:
                self._move_in(piece.parameter, place, piece.start, piece.stop)
        if everyone:
            self._seen = None
        for index in everyone:
            published = {key: entry.value for key, entry in self._entries[index].items()}
            self._former[index] = optimizer.state.get(self._parameters[index])
            self._published[index] = published
            if published:
                optimizer.state[self._parameters[index]] = dict(published)
            else:
                optimizer.state.pop(self._parameters[index], None)
        self._adopted = set()
        self._has_numbers = any(entry.kind.what == "number" for entries in self._entries for entry in entries.values())
        give_memory_back()

    def keep(self) -> None:
        """Drop what `take_back` needs. Call it once all ranks have settled."""
        self._former = {}

    def take_back(self, optimizer: Optimizer) -> None:
        """Give the user's optimizer the state that it had before `settle`. It is then of no further use."""
        for index, former in self._former.items():
            if former is None:
                optimizer.state.pop(self._parameters[index], None)
            else:
                optimizer.state[self._parameters[index]] = former

    def entries(self, index: int) -> Mapping[str, StateEntry]:
        """Return the entries in the state of a parameter, which all ranks see."""
        return self._entries[index]

    def publish(self) -> None:
        """Copy state that this rank's optimizer has put elsewhere to shared memory. Call it before a barrier."""
        for index, place in self._whole:
            state = self._sharded.state.get(place, {})
            for key, entry in self._entries[index].items():
                value: Any = state.get(key)
                if value is None:  # this rank is a guest, and the owner has adopted other state
                    continue
                if entry.kind.what == "number" and entry.vector is not None:
                    entry.vector[0] = value
                elif isinstance(value, Tensor) and value is not entry.value:
                    if tuple(value.shape) != entry.kind.shape:
                        self._refuse(index, key, f"changed its shape to {list(value.shape)}")
                    entry.value.copy_(value)
                    state[key] = entry.value
                    self._sharded.forget()

    def show_numbers(self, optimizer: Optimizer) -> None:
        """Set plain numbers in the user's optimizer, which other ranks may have changed. Call it after a barrier."""
        if not self._has_numbers:
            return
        for index, entries in enumerate(self._entries):
            for key, entry in entries.items():
                if entry.kind.what == "number" and entry.vector is not None:
                    number = type(entry.kind.constant)(entry.vector.item())
                    optimizer.state[self._parameters[index]][key] = self._published[index][key] = number

    def _kind(self, value: Any, place: Tensor, index: int, key: str) -> _Kind:
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.device.type != "cpu":
                self._refuse(index, key, f"is a tensor with layout {value.layout} on {value.device}")
            if value.dim() and value.shape == place.shape:
                return _Kind("like", value.dtype, tuple(self._parameters[index].shape))
            if value.dim() and place is not self._parameters[index]:
                self._refuse(index, key, f"has shape {list(value.shape)}")
            return _Kind("tensor", value.dtype, tuple(value.shape))
        if isinstance(value, (bool, int, float)):
            return _Kind("number", torch.float64 if isinstance(value, float) else torch.int64, (), value)
        if value is None or isinstance(value, str):
            return _Kind("constant", constant=value)
        return self._refuse(index, key, f"is of type {type(value).__name__}")

    def _build(self, everyone: dict[int, dict[str, _Kind]]) -> None:
        """Make the entries in the state of some parameters."""
        offset, places = 0, []
        for index in sorted(everyone):
            for key, kind in everyone[index].items():
                if kind.dtype is not None and key not in self._in_files.get(index, {}):
                    places.append((index, key, kind, offset))
                    offset += aligned(max(torch.Size(kind.shape).numel() * kind.dtype.itemsize, ALIGNMENT))
        value: Any
        segment = self._runtime.segment(offset, "optimizer state")
        for index, kinds in everyone.items():
            self._entries[index] = {
                key: StateEntry(kind, kind.constant, None) for key, kind in kinds.items() if kind.dtype is None
            }
            for key in kinds.keys() & self._in_files.get(index, {}).keys():
                value = self._in_files[index][key]
                self._entries[index][key] = StateEntry(kinds[key], value, value.view(-1))
        for index, key, kind, start in places:
            assert kind.dtype is not None
            vector = segment.tensor(start, (torch.Size(kind.shape).numel(),), kind.dtype)
            p = self._parameters[index]
            strides = dense_strides(p) if kind.what == "like" else None
            value = vector.view(kind.shape) if strides is None else vector.as_strided(kind.shape, strides)
            self._entries[index][key] = StateEntry(kind, kind.constant if kind.what == "number" else value, vector)
        self._settled = [len(self._entries[piece.parameter]) for piece in self._sharded.pieces]

    def _move_in(self, index: int, place: Tensor, start: int, stop: int) -> None:
        state = self._sharded.state.get(place, {})
        for key, entry in self._entries[index].items():
            value = state.get(key)
            if entry.vector is None or value is None:
                continue
            if self._is_in_file(index, key, value):
                state[key] = entry.value
            elif entry.kind.what == "number":
                entry.vector[0] = value
            elif entry.kind.what == "like":
                if place is self._parameters[index]:
                    entry.value.copy_(value)
                    state[key] = entry.value
                else:
                    part = entry.vector[start:stop]
                    part.copy_(value)
                    state[key] = part
            elif start == 0:
                # A number for all pieces is the same in each; the number of the first piece is published.
                entry.value.copy_(value)
                state[key] = entry.value

    def _is_in_file(self, index: int, key: str, value: Any) -> bool:
        """Return True if a value of the state is where all ranks see it, in the file of a table."""
        memory = self._in_files.get(index, {}).get(key)
        return memory is not None and isinstance(value, Tensor) and value.data_ptr() == memory.data_ptr()

    def _own_part(self, value: Any, parameter: Tensor, place: Tensor, start: int, stop: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if place is parameter or value.shape != parameter.shape or not value.dim():
            return value.clone()
        return in_memory_order(value, dense_strides(parameter))[start:stop].clone()

    def _refuse(self, index: int, key: str, what: str) -> NoReturn:
        raise UnisonoError(
            f"the optimizer's state {key!r} of parameter {self._names[index]!r} {what}, which cannot be shared between "
            'ranks: give Trainer engine="collective".'
        )


def copy_state(optimizer: Optimizer) -> None:
    """Replace the state of an optimizer, which may lie in shared memory, by a copy of this rank's own."""
    for p, state in optimizer.state.items():
        optimizer.state[p] = {
            key: value.clone(memory_format=torch.preserve_format) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
