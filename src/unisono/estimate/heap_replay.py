"""What a process keeps of the memory that it takes and gives back: the C library decides, so it is asked.

Free blocks between used ones stay with a process, and serve others only if these fit: a tenth to a third of its memory.
That follows from the sizes and the order of the blocks alone. So a step is replayed: blocks of the same sizes are taken
and given back in the same order, and nothing is written to them. They take addresses and no memory, and a step can be
replayed that would not fit. What would be resident is counted by the addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch

from unisono.machine import give_memory_back
from unisono.trainer.setup import MAPPED_NBYTES, keep_freed_memory

__all__ = ["HeapPeak", "MemoryOperation", "replay"]

_PAGE = 4096
_SMALL_NBYTES = 1024
"""Smaller blocks come from lists of their own, and are not worth the time."""
_RUN = 1 << 14


class MemoryOperation(NamedTuple):
    """Something that a process does with its memory."""

    what: Literal["take", "give", "map", "trim", "step"]
    """A block is taken from the heap, or given back; pages are mapped outside of it; free memory goes to the system; a
    step begins."""
    block: int = 0
    """The number of the block."""
    nbytes: int = 0
    kind: str = ""
    """What the block counts as."""


class HeapPeak(NamedTuple):
    """The moment at which most memory was resident."""

    nbytes: int
    used: dict[str, int]
    """What was in use then, by kind. The rest are holes."""
    renewed_nbytes: int = 0
    """What the last step took from the system: pages that are made anew in each step."""


class _Pages:
    """The pages of the heap that were written, as far as they are resident."""

    def __init__(self) -> None:
        self._runs: dict[int, bytearray] = {}
        """Runs of pages by their number: a heap may be in several places, far from each other."""
        self.count = 0

    def add(self, start: int, stop: int) -> None:
        """Add the pages of a block."""
        page, last = start // _PAGE, -(-stop // _PAGE)
        while page < last:
            number, first = divmod(page, _RUN)
            end = min(_RUN, first + last - page)
            run = self._runs.get(number)
            if run is None:
                run = self._runs[number] = bytearray(_RUN)
            if missing := run.count(0, first, end):
                run[first:end] = b"\1" * (end - first)
                self.count += missing
            page += end - first

    def keep(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Forget all pages but those of some blocks."""
        self._runs.clear()
        self.count = 0
        for start, stop in blocks:
            self.add(start, stop)


class _Replay:
    """The blocks of a process, and what of its memory would be resident."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}
        """Those in the heap."""
        self._outside: dict[int, int] = {}
        """The sizes of the others."""
        self._kinds: dict[int, tuple[str, int]] = {}
        self._used: Counter[str] = Counter()
        self._pages, self._mapped = _Pages(), 0
        self.renewed_nbytes = 0
        self.peak = HeapPeak(0, {})

    def take(self, number: int, nbytes: int, kind: str, *, in_heap: bool) -> None:
        self._used[kind] += nbytes
        self._kinds[number] = kind, nbytes
        if in_heap and _SMALL_NBYTES < nbytes < MAPPED_NBYTES:
            block = self._blocks[number] = torch.empty(nbytes, dtype=torch.uint8)
            before = self._pages.count
            self._pages.add(block.data_ptr(), block.data_ptr() + nbytes)
            self.renewed_nbytes += (self._pages.count - before) * _PAGE
        else:
            self._outside[number] = nbytes
            if nbytes >= MAPPED_NBYTES or not in_heap:
                self.renewed_nbytes += nbytes
            self._mapped += nbytes
        resident = self._pages.count * _PAGE + self._mapped
        if resident > self.peak.nbytes:
            self.peak = HeapPeak(resident, dict(self._used))

    def give(self, number: int) -> None:
        kind, nbytes = self._kinds.pop(number)
        self._used[kind] -= nbytes
        if self._blocks.pop(number, None) is None:
            self._mapped -= self._outside.pop(number)

    def trim(self) -> None:
        give_memory_back()
        self._pages.keep((block.data_ptr(), block.data_ptr() + block.nbytes) for block in self._blocks.values())


def replay(operations: Iterable[MemoryOperation]) -> HeapPeak:
    """Do operations with the heap of this process, and return when it took most.

    The process should have done little before, and end afterwards: its heap has other holes then.
    """
    keep_freed_memory()
    state = _Replay()
    for what, number, nbytes, kind in operations:
        if what == "give":
            state.give(number)
        elif what == "trim":
            state.trim()
        elif what == "step":
            state.renewed_nbytes = 0
        else:
            state.take(number, nbytes, kind, in_heap=what == "take")
    return state.peak._replace(renewed_nbytes=state.renewed_nbytes)
