"""The few numbers of a step that all ranks need, in shared memory, and the overflow of scaled gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.engine.exchange import Layout
from unisono.engine.norm import BLOCK, block_norms, blocks_of
from unisono.engine.shared.hall import Hall
from unisono.engine.shared.parts import Piece
from unisono.plan import fold

__all__ = ["Table", "note", "unscale"]

_TOTALS = 4


class Table:
    """The few numbers of a step that all ranks need: totals, which parameters got a gradient, norms, overflow."""

    def __init__(self, hall: Hall, widest: Layout, numels: list[int]) -> None:
        counts = [len(nodes) for nodes in widest.nodes]
        self._firsts = [sum(counts[:rank]) for rank in range(hall.size)]
        self._first = self._firsts[hall.rank]
        blocks = [-(-numel // BLOCK) for numel in numels]
        self._first_blocks = [sum(blocks[:i]) for i in range(len(blocks))]
        width = -(-(_TOTALS + len(numels)) // 64) * 64
        rows_nbytes = sum(counts) * width * 4
        norms_nbytes = -(-max(sum(blocks), 1) // 64) * 64 * 8
        segment = hall.segment(rows_nbytes + norms_nbytes + 4 * hall.size, "totals")
        rows = segment.tensor(0, (sum(counts), width), torch.float32)[:, : _TOTALS + len(numels)]
        self._rows = list(rows.unbind())
        self.norms = segment.tensor(rows_nbytes, (sum(blocks),), torch.float64)
        """Of each block of each parameter."""
        self.found_inf = segment.tensor(rows_nbytes + norms_nbytes, (hall.size,), torch.float32)
        """1 for a rank that found a gradient that is not finite."""
        self._used_shown: dict[int, list[bool]] = {}
        self._schedules: dict[int, tuple[list[tuple[int, int]], int]] = {}
        """By number of leaves, since to plan a sum takes longer than to do it."""

    def write(self, i: int, totals: Tensor, used: list[bool]) -> None:
        """Show the totals of this rank's node number i, and which parameters got a gradient there."""
        row = self._rows[self._first + i]
        row[:_TOTALS] = totals
        if self._used_shown.get(i) != used:
            row[_TOTALS:] = torch.tensor(used, dtype=torch.float32)
            self._used_shown[i] = used

    def total(self, layout: Layout) -> Tensor:
        """Sum the rows in tree order."""
        schedule = self._schedules.get(layout.leaves)
        if schedule is None:
            schedule = self._schedules[layout.leaves] = self._schedule(layout)
        additions, last = schedule
        values = list(self._rows)
        for left, right in additions:
            values.append(torch.add(values[left], values[right]))
        return values[last]

    def _schedule(self, layout: Layout) -> tuple[list[tuple[int, int]], int]:
        """List which values to add, by number: rows first, then sums in their order; and the number of the last."""
        additions: list[tuple[int, int]] = []

        def add(left: int, right: int) -> int:
            additions.append((left, right))
            return len(self._rows) + len(additions) - 1

        firsts = zip(self._firsts, layout.nodes, strict=True)
        numbers = {node: first + i for first, nodes in firsts for i, node in enumerate(nodes)}
        return additions, fold(numbers, leaves=layout.leaves, add=add)

    def write_norms(self, pieces: Sequence[Piece], used: Sequence[Piece], totals: Sequence[Tensor]) -> None:
        """Show the norms of this rank's pieces, 0 for those without a gradient."""
        for index, start, stop in pieces:
            first = self._first_blocks[index]
            self.norms[first + start // BLOCK : first + -(-stop // BLOCK)] = 0.0
        blocks: list[Tensor] = []
        places: list[int] = []
        for (index, start, _), total in zip(used, totals, strict=True):
            cut_up = blocks_of(total)
            first = self._first_blocks[index] + start // BLOCK
            places += range(first, first + len(cut_up))
            blocks += cut_up
        if blocks:
            self.norms[places] = block_norms(blocks)


def unscale(totals: Sequence[Tensor], scaler: torch.amp.GradScaler) -> Tensor:
    """Take the scale out, as `GradScaler.unscale_` does. Returns: 1 if a value is not finite, else 0."""
    inverse = torch.tensor(scaler.get_scale(), dtype=torch.float64).reciprocal().float()
    found = torch.zeros(())
    for dtype in {total.dtype for total in totals}:
        torch._amp_foreach_non_finite_check_and_unscale_([t for t in totals if t.dtype == dtype], found, inverse)
    return found


def note(scaler: torch.amp.GradScaler, found_inf: Tensor) -> None:
    """Tell a scaler what was found, which it asks an optimizer's gradients for."""
    messenger = torch.zeros(())
    messenger.grad = torch.full((), torch.inf) if found_inf.item() else torch.zeros(())
    scaler.unscale_(torch.optim.SGD([messenger], lr=0.0))
