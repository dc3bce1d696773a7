"""All-reduce of a small vector among the ranks of one host, for buffers, synchronized by the barriers of a step.

The calls are those of `engine.tree_all_reduce.AllReduce`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unisono.engine.shared.row_schedule import RowSchedule
from unisono.engine.shared.shared_runtime import SharedRuntime
from unisono.engine.step_transaction import StepTransaction
from unisono.engine.tree_all_reduce import NodeLayout
from unisono.plan.alignment import BUFFER_NUMEL, align_up

__all__ = ["SharedAllReduce"]


class SharedAllReduce:
    """One vector in shared memory, with a row for each node of each rank. Every rank must build it.

    Rows that were launched can be read after the next barrier. All ranks must have read them when they arrive at the
    barrier after that, and no rank may write rows again before it; the barriers of a step ensure both.
    """

    def __init__(self, runtime: SharedRuntime, numel: int, *, widest: NodeLayout, dtype: torch.dtype) -> None:
        counts = [len(nodes) for nodes in widest.nodes]
        self._runtime, self._layout = runtime, widest
        self._firsts = [sum(counts[:rank]) for rank in range(runtime.size)]
        width = align_up(max(numel, 1), BUFFER_NUMEL)
        segment = runtime.segment(sum(counts) * width * dtype.itemsize, "buffers")
        self._rows = segment.tensor(0, (sum(counts), width), dtype).unbind()
        first = self._firsts[runtime.rank]
        self.rows = self._rows[first : first + counts[runtime.rank]]
        """This rank's rows."""
        self._launched_at = 0
        self._schedules: dict[int, RowSchedule] = {}
        """The schedules, by number of leaves."""

    def start(self, layout: NodeLayout) -> None:
        """Begin a step."""
        self._layout = layout

    def launch(self) -> None:
        """Publish the rows to all ranks at the next barrier."""
        self._launched_at = self._runtime.barriers

    def advance(self) -> None:
        """Do nothing: there is nothing to send."""

    def finish(self, step: StepTransaction) -> Tensor:
        """Return the sum. Every rank must call it. If the step has passed no barrier since `launch`, it passes one."""
        if step.passed is None or step.passed <= self._launched_at:
            step.passed = self._runtime.barrier("waiting for the buffers of all ranks", step)
        layout = self._layout
        schedule = self._schedules.get(layout.leaves)
        if schedule is None:
            schedule = RowSchedule.of(layout, firsts=self._firsts, num_rows=len(self._rows))
            self._schedules[layout.leaves] = schedule
        values = [*self._rows]
        for left, right in schedule.additions:
            values.append(torch.add(values[left], values[right]))
        return values[schedule.last] if schedule.additions else values[schedule.last].clone()
