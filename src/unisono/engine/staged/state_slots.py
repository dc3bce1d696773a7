"""Copies of the state of each rank in memory that all ranks of the host share, so that they outlive the rank.

Each rank has an area with two slots, for the state after an even and after an odd number of commits: while one is
written, the other stays whole. Which of them counts is not decided here, but by words (`shared.update_progress`).
Start reading at `StateSlots.write`.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unisono.engine.norm import dense_strides
from unisono.shm.segment import ALIGNMENT, Segment, aligned

__all__ = ["StateContent", "StateSlots", "slots_nbytes"]

_WORD = 8
_SIZE, _FULL, _CAPACITIES = range(3)
_NUMBER, _DOCUMENT_AT, _DOCUMENT_NBYTES, _WORDS = range(4)
_HEAD_NBYTES = aligned(_WORD * _WORDS)


class _PlacedState(NamedTuple):
    """A tensor in a slot."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def view(self, segment: Segment, begin: int) -> Tensor:
        """Return it in the slot that begins at an offset."""
        flat = segment.tensor(begin + self.offset, [self.nbytes // self.dtype.itemsize], self.dtype)
        return flat.as_strided(self.shape, self.strides)

    @property
    def nbytes(self) -> int:
        numel = 1
        for size in self.shape:
            numel *= size
        return numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateContent:
    """The state of a rank as it is copied: named tensors in groups, and a JSON document. It can be copied repeatedly.

    Tensors share memory with the run. One that has several names is copied once.
    """

    groups: Mapping[str, Mapping[str, Tensor]]
    document: Any


class _Planned:
    """Where the parts of a content lie in a slot, and its views there, by the beginning of the slot."""

    def __init__(self, content: StateContent) -> None:
        self.content = content
        placed: dict[int, _PlacedState] = {}
        self.tensors: list[Tensor] = []
        offset, tables = _HEAD_NBYTES, dict[str, list[Any]]()
        for group, tensors in content.groups.items():
            table = tables[group] = []
            for name, tensor in tensors.items():
                if id(tensor) not in placed:
                    one = _PlacedState(offset, tuple(tensor.shape), dense_strides(tensor), tensor.dtype)
                    placed[id(tensor)] = one
                    self.tensors.append(tensor)
                    offset += aligned(one.nbytes)
                at, shape, strides, dtype = placed[id(tensor)]
                table.append([name, at, shape, strides, str(dtype).removeprefix("torch.")])
        self.document = json.dumps({"document": content.document, "tensors": tables}).encode()
        self.document_at = offset
        self.nbytes = offset + aligned(len(self.document))
        self._placed = [placed[id(tensor)] for tensor in self.tensors]
        self._views: dict[int, list[Tensor]] = {}

    def views(self, segment: Segment, begin: int) -> list[Tensor]:
        """Return the places of the tensors in a slot."""
        if begin not in self._views:
            self._views[begin] = [each.view(segment, begin) for each in self._placed]
        return self._views[begin]


class StateSlots:
    """The areas of all ranks in one segment.

    Args:
        segment: The memory, of `slots_nbytes` bytes; `prepare` has written to it. Its descriptor is closed with this
            object.
        rank: This rank.
    """

    def __init__(self, segment: Segment, *, rank: int) -> None:
        self._segment, self._rank = segment, rank
        self._words = memoryview(segment.memory)[: segment.nbytes // _WORD * _WORD].cast("q")
        size = self._words[_SIZE]
        self._capacities = self._words[_CAPACITIES : _CAPACITIES + size].tolist()
        self._planned: _Planned | None = None
        weakref.finalize(self, segment.close_descriptor)

    @staticmethod
    def prepare(capacities: Sequence[int]) -> Callable[[Segment], None]:
        """Return what writes the sizes of the slots into a new segment.

        Args:
            capacities: The bytes of a slot of each rank, multiples of `ALIGNMENT`.
        """

        def write(segment: Segment) -> None:
            words = memoryview(segment.memory)[: _head_nbytes(len(capacities))].cast("q")
            words[_SIZE] = len(capacities)
            for rank, capacity in enumerate(capacities):
                assert capacity % ALIGNMENT == 0
                words[_CAPACITIES + rank] = capacity

        return write

    @property
    def segment(self) -> Segment:
        """The memory."""
        return self._segment

    @property
    def is_full(self) -> bool:
        """True if a `write` of some rank has found too little room. Other ranks see it after the next barrier."""
        return bool(self._words[_FULL])

    def write(self, number: int, content: StateContent) -> None:
        """Copy the state of this rank, as it is after a commit, over that of the commit before the last.

        Traffic: one pass over the state. A content that is given again is copied without being described anew.
        If there is too little room, nothing is written, and `is_full` is True from then on.

        Args:
            number: The number of the commit.
            content: The state.
        """
        if self._planned is None or self._planned.content is not content:
            self._planned = _Planned(content)
        planned, begin = self._planned, self._begin(self._rank, number)
        if planned.nbytes > self._capacities[self._rank]:
            self._words[_FULL] = 1
            return
        at = begin // _WORD
        self._words[at + _NUMBER] = 0
        if planned.tensors:
            with torch.no_grad():
                torch._foreach_copy_(planned.views(self._segment, begin), planned.tensors)
        where = begin + planned.document_at
        self._segment.memory[where : where + len(planned.document)] = planned.document
        self._words[at + _DOCUMENT_AT], self._words[at + _DOCUMENT_NBYTES] = planned.document_at, len(planned.document)
        self._words[at + _NUMBER] = number

    def read(self, rank: int, number: int) -> StateContent:
        """Return the state of a rank after a commit. Its tensors lie in the slot: copy what is to be kept."""
        begin = self._begin(rank, number)
        at = begin // _WORD
        assert self._words[at + _NUMBER] == number, f"rank {rank} has no copy of commit {number}"
        where, nbytes = begin + self._words[at + _DOCUMENT_AT], self._words[at + _DOCUMENT_NBYTES]
        found = json.loads(self._segment.memory[where : where + nbytes])
        groups = {
            group: {
                name: _PlacedState(offset, tuple(shape), tuple(strides), getattr(torch, dtype)).view(
                    self._segment, begin
                )
                for name, offset, shape, strides, dtype in table
            }
            for group, table in found["tensors"].items()
        }
        return StateContent(groups, found["document"])

    def _begin(self, rank: int, number: int) -> int:
        before = _head_nbytes(len(self._capacities)) + 2 * sum(self._capacities[:rank])
        return before + number % 2 * self._capacities[rank]


def slots_nbytes(capacities: Sequence[int]) -> int:
    """Return the size of a segment with two slots for each rank. Pages are allocated once they are written."""
    return _head_nbytes(len(capacities)) + 2 * sum(capacities)


def _head_nbytes(size: int) -> int:
    return aligned(_WORD * (_CAPACITIES + size))
