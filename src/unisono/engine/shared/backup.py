"""Copies of the weights and of the optimizers' state, in shared memory, from before an update.

Each rank copies its own part, all of it or one portion in each step. Any rank can put back the part of any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unisono.engine.norm import BLOCK
from unisono.engine.shared.optimizer_update import OptimizerUpdate
from unisono.engine.shared.partition import Piece, partition
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.shm.segment import aligned

__all__ = ["Backup", "Portion", "StateCopy", "portions_of"]


class Portion(NamedTuple):
    """A range of one of a rank's pieces, which is copied in one turn."""

    piece: Piece
    shard: Piece
    """The range, as elements of the parameter."""


class StateCopy(NamedTuple):
    """The copy of an entry in the state of a portion."""

    update: int
    """The number of the optimizer."""
    key: str
    is_like: bool
    """True if the entry has a value for each element; False for one that is equal for all pieces of the parameter."""
    shape: tuple[int, ...]
    memory: Tensor
    """The shared memory of the entry: this portion's, or all of one that is equal for all pieces."""
    copy: Tensor


class _PortionCopy(NamedTuple):
    """The copy of all that an update writes in a portion."""

    portion: Portion
    values: Tensor
    """The shared memory of the weights."""
    copy: Tensor
    state: list[StateCopy]


class Backup:
    """The copies of the parts of all ranks.

    The state that exists when it is built is copied; the state that an update creates is not, and needs no copy.

    Args:
        runtime: Allocates the copies. Every rank must build them.
        parts: The pieces of each rank.
        vectors: The weights of each parameter as a vector.
        updates: The optimizers.
        turns: The number of portions into which each rank's part is divided.
    """

    def __init__(
        self,
        runtime: SharedRuntime,
        parts: Sequence[Sequence[Piece]],
        vectors: Sequence[Tensor],
        updates: Sequence[OptimizerUpdate],
        *,
        turns: int,
    ) -> None:
        portions = [[*portions_of(part, turns)] for part in parts]
        sizes = [0]
        for of_rank in portions:
            for portion in (portion for of_turn in of_rank for portion in of_turn):
                sizes += [
                    aligned(memory.numel() * memory.element_size())
                    for memory in (
                        _range(vectors, portion.shard),
                        *(each.memory for each in _state_of(portion, updates)),
                    )
                ]
        segment = runtime.segment(sum(sizes), "backup")
        places = iter(sizes)
        offset = next(places)

        def copy_of(memory: Tensor) -> Tensor:
            nonlocal offset
            copy = segment.tensor(offset, memory.shape, memory.dtype)
            offset += next(places)
            return copy

        self._copies: list[list[list[_PortionCopy]]] = []
        """The copies, by rank and turn."""
        for of_rank in portions:
            self._copies.append([])
            for of_turn in of_rank:
                self._copies[-1].append([])
                for portion in of_turn:
                    values = _range(vectors, portion.shard)
                    copy = copy_of(values)
                    state = [each._replace(copy=copy_of(each.memory)) for each in _state_of(portion, updates)]
                    self._copies[-1][-1].append(_PortionCopy(portion, values, copy, state))
        self._calls = [_calls_for(of_turn, updates) for of_turn in self._copies[runtime.rank]]
        """For each turn, the tensors to write to and those to copy."""

    def copy(self, turn: int) -> None:
        """Copy one portion of this rank's part."""
        targets, sources = self._calls[turn]
        if targets:
            torch._foreach_copy_(targets, sources)

    def restore(self, rank: int, turn: int) -> list[_PortionCopy]:
        """Put back one portion of a rank's part. Return what it consists of.

        An entry of the state that is equal for all pieces of a parameter is put back with the first piece.
        """
        restored = self._copies[rank][turn]
        for _, values, copy, state in restored:
            values.copy_(copy)
            for each in state:
                if each.is_like:
                    each.memory.copy_(each.copy)
        for each in _firsts(restored):
            each.memory.copy_(each.copy)
        return restored


def portions_of(pieces: Sequence[Piece], turns: int) -> Iterator[list[Portion]]:
    """Divide a rank's pieces evenly into so many lists of portions.

    >>> [[tuple(each.shard) for each in turn] for turn in portions_of([Piece(3, 16384, 65536), Piece(4, 0, 9)], 2)]
    [[(3, 16384, 49152)], [(3, 49152, 65536), (4, 0, 9)]]
    """
    for ranges in partition([stop - start for _, start, stop in pieces], ranks=turns, unit=BLOCK):
        yield [
            Portion(pieces[k], Piece(pieces[k].parameter, pieces[k].start + start, pieces[k].start + stop))
            for k, start, stop in ranges
        ]


def _range(vectors: Sequence[Tensor], shard: Piece) -> Tensor:
    return vectors[shard.parameter][shard.start : shard.stop]


def _state_of(portion: Portion, updates: Sequence[OptimizerUpdate]) -> Iterator[StateCopy]:
    """Yield the entries in the state of a portion; their copies are to be made."""
    index, start, stop = portion.shard
    for number, update in enumerate(updates):
        for key, entry in update.state.entries(index).items():
            if entry.vector is not None:
                is_like = entry.kind.what == "like"
                memory = entry.vector[start:stop] if is_like else entry.vector
                yield StateCopy(number, key, is_like, entry.kind.shape, memory, memory)


def _firsts(copies: Sequence[_PortionCopy]) -> Iterator[StateCopy]:
    """Yield the entries that are equal for all pieces of a parameter, each once for all ranks."""
    for portion, _, _, state in copies:
        if portion.shard.start == 0:
            yield from (each for each in state if not each.is_like)


def _calls_for(copies: Sequence[_PortionCopy], updates: Sequence[OptimizerUpdate]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors to write to and those to copy for one portion of this rank's part."""
    targets, sources = [], []
    places = [dict(zip(update.sharded.pieces, update.sharded.places, strict=True)) for update in updates]
    for portion, values, copy, state in copies:
        targets.append(copy)
        sources.append(values)
        for each in state:
            source = each.memory
            if not each.is_like and portion.piece.start:  # equal for all pieces, but each has its own
                own = updates[each.update].sharded.state.get(places[each.update][portion.piece], {}).get(each.key)
                if not isinstance(own, Tensor):
                    continue
                source = own.view(-1)
            targets.append(each.copy)
            sources.append(source)
    return targets, sources
