"""Numbers of a step that all ranks need, in shared memory, and the detection of overflow in scaled gradients."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.engine.norm import BLOCK, block_norms, blocks_of
from unisono.engine.shared.partition import Piece
from unisono.engine.shared.row_schedule import RowSchedule
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.step_transaction import Passed
from unisono.engine.totals import COUNT, Totals, TotalsRow, rounded_sum, totals_of
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.shm.segment import aligned

__all__ = ["StepMetadata", "note", "unscale"]

_ROW_NBYTES = 4 * COUNT


class StepMetadata:
    """The numbers of a step that all ranks need: totals, which parameters got a gradient, norms, overflow."""

    def __init__(self, runtime: SharedRuntime, widest: NodeLayout, numels: list[int]) -> None:
        counts = [len(nodes) for nodes in widest.nodes]
        self._firsts = [sum(counts[:rank]) for rank in range(runtime.size)]
        self._first = self._firsts[runtime.rank]
        blocks = [-(-numel // BLOCK) for numel in numels]
        self._first_blocks = [sum(blocks[:i]) for i in range(len(blocks))]
        totals_nbytes = aligned(sum(counts) * _ROW_NBYTES)
        self._width = len(numels)
        used_nbytes = aligned(sum(counts) * self._width)
        norms_nbytes = aligned(sum(blocks) * 8)
        segment = runtime.segment(totals_nbytes + used_nbytes + norms_nbytes + 4 * runtime.size, "totals")
        memory = memoryview(segment.memory)
        self._totals = memory[: sum(counts) * _ROW_NBYTES].cast("f")
        """A row for each node."""
        self._used = memory[totals_nbytes : totals_nbytes + sum(counts) * self._width]
        """For each node, a byte for each parameter: 1 if it got a gradient there."""
        self.norms = segment.tensor(totals_nbytes + used_nbytes, (sum(blocks),), torch.float64)
        """The norm of each block of each parameter."""
        self.found_inf = segment.tensor(totals_nbytes + used_nbytes + norms_nbytes, (runtime.size,), torch.float32)
        """For each rank, 1 if it found a gradient that is not finite."""
        self._written: dict[int, list[bool]] = {}
        """The flags that this rank last wrote to `_used`, by number of the node."""
        self._seen: tuple[int, bytes, list[bool]] = (-1, b"", [])
        """The last step's number of leaves, all of `_used`, and the flags that `total` made of it."""
        self._schedules: dict[int, RowSchedule] = {}
        """The schedules, by number of leaves."""

    def write(self, i: int, totals: TotalsRow, used: list[bool]) -> None:
        """Write the totals of this rank's node number i, and which parameters got a gradient there."""
        number = self._first + i
        assert isinstance(totals, array)  # losses are on the CPU
        self._totals[number * COUNT : (number + 1) * COUNT] = memoryview(totals)
        if self._written.get(i) != used:
            self._used[number * self._width : (number + 1) * self._width] = bytes(used)
            self._written[i] = used

    def total(self, layout: NodeLayout, passed: Passed) -> tuple[Totals, list[bool]]:
        """Return the totals, summed in tree order, and for each parameter whether it got a gradient on any rank.

        All ranks must have written their numbers before the barrier `passed`.
        """
        leaves = layout.leaves
        schedule = self._schedules.get(leaves)
        if schedule is None:
            num_rows = len(self._totals) // COUNT
            schedule = self._schedules[leaves] = RowSchedule.of(layout, firsts=self._firsts, num_rows=num_rows)
        numbers = self._totals.tolist()
        rows: list[Sequence[float]] = [numbers[i : i + COUNT] for i in range(0, len(numbers), COUNT)]
        for left, right in schedule.additions:
            rows.append(rounded_sum(rows[left], rows[right]))
        used = self._used.tobytes()
        if (leaves, used) != self._seen[:2]:
            w = self._width
            columns = zip(*(used[row * w : (row + 1) * w] for row in schedule.rows), strict=True)
            self._seen = leaves, used, [any(column) for column in columns]
        return totals_of(rows[schedule.last]), self._seen[2]

    def write_norms(self, pieces: Sequence[Piece], used: Sequence[Piece], totals: Sequence[Tensor]) -> None:
        """Write the norms of this rank's pieces, 0 for those without a gradient."""
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
    """Unscale gradients, as `GradScaler.unscale_` does. Return 1 if a value is not finite, otherwise 0."""
    device = totals[0].device if totals else None
    inverse = torch.tensor(scaler.get_scale(), dtype=torch.float64).reciprocal().float().to(device)
    found = torch.zeros((), dtype=torch.float32, device=device)
    for dtype in {total.dtype for total in totals}:
        torch._amp_foreach_non_finite_check_and_unscale_([t for t in totals if t.dtype == dtype], found, inverse)
    return found


def note(scaler: torch.amp.GradScaler, found_inf: Tensor) -> None:
    """Report an overflow to a scaler, which looks for it in an optimizer's gradients."""
    scale = scaler._scale
    messenger = torch.zeros((), dtype=torch.float32, device=found_inf.device if scale is None else scale.device)
    messenger.grad = torch.full_like(messenger, torch.inf if found_inf.item() else 0.0)
    scaler.unscale_(torch.optim.SGD([messenger], lr=0.0))
