"""The sums of sparse gradients: how ranks divide the rows of a table."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unisono.engine import StepTransaction, Trained
from unisono.engine.all_gather_v import packed_nbytes, write_parts
from unisono.engine.sparse_tables import TableSums
from unisono.engine.tree_all_reduce import NodeLayouts

RANKS, LEAVES, ROWS = 3, 5, 100_000


class Messages:
    """What all ranks have posted, for ranks that run one after the other."""

    def __init__(self):
        self.posted = []

    def post(self, parts):
        message = torch.zeros(packed_nbytes(parts), dtype=torch.uint8)
        write_parts(parts, message)
        self.posted.append(message)

    def collect(self, step):
        return self.posted


def sums_of_ranks(ids_of):
    """Return the sums of each rank after `collect`, of a table of which leaf number i has the ids ids_of(i)."""
    layouts, messages = NodeLayouts(RANKS, virtual_ranks=LEAVES), Messages()
    layout, everyone = layouts.of(LEAVES), []
    for rank in range(RANKS):
        module = nn.Embedding(ROWS, 2, sparse=True, _weight=torch.zeros(ROWS, 2))
        sums = TableSums(Trained(("words",), (module.weight,)), rank=rank, all_gather=messages, divided={0})
        sums.begin(layout)
        for leaf in (leaf for node in layout.nodes[rank] for leaf in range(*node)):
            generator = torch.Generator().manual_seed(leaf)
            ids = ids_of(leaf, generator)
            (module(ids) * torch.randn(len(ids), 2, generator=generator)).sum().backward()
            sums.close_leaf(leaf)
        sums.post()
        everyone.append(sums)
    for sums in everyone:
        sums.collect(StepTransaction())
    return everyone


@pytest.mark.parametrize(
    ("ids_of", "even"),
    [
        pytest.param(lambda _, g: torch.randint(0, ROWS, (900,), generator=g), 0.2, id="even"),
        pytest.param(lambda _, g: (ROWS * torch.rand(900, generator=g) ** 6).long(), 0.2, id="small ids are frequent"),
        pytest.param(lambda i, g: 20_000 * i + torch.randint(0, 900, (900,), generator=g), 0.2, id="leaves apart"),
        pytest.param(lambda _, g: torch.randint(0, 30, (900,), generator=g), None, id="few rows"),
        pytest.param(lambda _, g: torch.zeros(0, dtype=torch.int64), None, id="no row"),
    ],
)
def test_shares_of_ranks_are_even_and_together_the_whole_sum(ids_of, even):
    everyone = sums_of_ranks(ids_of)
    shares = [sums.share(0, ranks=RANKS) for sums in everyone]
    for sums in everyone:
        sums.complete(1.0)
    (whole,) = everyone[0].totals
    for parts in (shares, [sums.share(0, ranks=RANKS) for sums in everyone]):
        assert torch.equal(torch.cat([part._indices()[0] for part in parts]), whole._indices()[0])
        assert torch.equal(torch.cat([part._values() for part in parts]), whole._values())
    if even is not None:
        counts = [share._nnz() / whole._nnz() for share in shares]
        assert max(counts) - min(counts) < even, counts
    assert torch.equal(everyone[0].share(0, ranks=1)._values(), whole._values())


def test_a_table_without_any_gradient_has_no_share():
    layouts, messages = NodeLayouts(1, virtual_ranks=1), Messages()
    module = nn.Embedding(9, 2, sparse=True)
    sums = TableSums(Trained(("words",), (module.weight,)), all_gather=messages, divided={0})
    sums.begin(layouts.of(1))
    sums.close_leaf(0)
    sums.post()
    sums.collect(StepTransaction())
    assert sums.share(0, ranks=1) is None and sums.used == [False]
