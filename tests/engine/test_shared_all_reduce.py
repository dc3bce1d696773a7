"""The sum of a small vector in shared memory travels with a barrier of the step, or with one of its own."""

from __future__ import annotations

import pytest
import torch

from unisono.engine import StepTransaction
from unisono.engine.shared.shared_all_reduce import SharedAllReduce
from unisono.engine.tree_all_reduce import NodeLayouts
from unisono.plan import fold


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("barriers", [0, 1])
def test_the_sum_is_that_of_the_tree(size, barriers, make_runtimes, run_threads):
    layouts = NodeLayouts(size, virtual_ranks=6)
    runtimes = make_runtimes(size)
    ranks = [SharedAllReduce(runtime, 70, widest=layouts.widest, dtype=torch.float64) for runtime in runtimes]
    generator = torch.Generator().manual_seed(size)
    for leaves in (6, 4, 6):
        layout = layouts.of(leaves)
        values = {node: torch.randn(70, generator=generator).double() for n in layout.nodes for node in n}

        def work(rank, layout=layout, values=values):
            runtime, each, step = runtimes[rank], ranks[rank], StepTransaction()
            step.passed = runtime.barrier("", step)  # both before `launch`, and so no proof
            runtime.barrier("", step)
            each.start(layout)
            for row, node in zip(each.rows, layout.nodes[rank], strict=False):
                row[:70] = values[node]
            each.launch()
            for _ in range(barriers):
                step.passed = runtime.barrier("", step)
            total = each.finish(step).clone()
            runtime.barrier("", step)
            return total

        expected = fold(values, leaves=leaves, add=torch.add)
        for total in run_threads(work, size):
            assert torch.equal(total[:70], expected)
    assert {runtime.barriers for runtime in runtimes} == {12}
