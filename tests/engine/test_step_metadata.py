"""Totals are summed in tree order, whoever asks; norms and overflow lie where all ranks see them."""

from __future__ import annotations

from array import array

import pytest
import torch

from unisono.engine.norm import BLOCK, block_norms, blocks_of
from unisono.engine.shared.partition import partition
from unisono.engine.shared.step_metadata import StepMetadata, note, unscale
from unisono.engine.step_transaction import Passed
from unisono.engine.totals import add_rows, row_of, totals_of
from unisono.engine.tree_all_reduce import NodeLayouts
from unisono.plan import fold


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_totals_are_summed_in_the_order_of_the_tree(size, make_runtimes):
    generator = torch.Generator().manual_seed(size)
    layouts = NodeLayouts(size, virtual_ranks=7)
    ranks = [StepMetadata(runtime, layouts.widest, [5, 5, 5]) for runtime in make_runtimes(size)]
    for leaves in (7, 3, 7):
        layout = layouts.of(leaves)
        rows = {}
        for table, nodes in zip(ranks, layout.nodes, strict=True):
            for i, node in enumerate(nodes):
                row = row_of(torch.randn((), generator=generator), 4096.0 * 3 + node.start, new_buffers=node.start == 2)
                table.write(i, row, [node.start == 0, False, True])
                rows[node] = row
        expected = totals_of(fold({node: array("f", row) for node, row in rows.items()}, leaves=leaves, add=add_rows))
        found = [table.total(layout, Passed(1)) for table in ranks]
        assert found == [(expected, [True, False, True])] * size


def test_norms_of_pieces_are_those_of_the_whole(make_runtimes):
    numels = [2 * BLOCK + 5, 7, BLOCK]
    gradients = [torch.randn(numel, generator=torch.Generator().manual_seed(numel)) for numel in numels]
    layouts = NodeLayouts(3, virtual_ranks=3)
    parts = partition(numels, ranks=3, unit=BLOCK)
    ranks = [StepMetadata(runtime, layouts.widest, numels) for runtime in make_runtimes(3)]
    ranks[0].norms.fill_(9.0)
    for table, pieces in zip(ranks, parts, strict=True):
        used = [piece for piece in pieces if piece.parameter != 1]
        table.write_norms(pieces, used, [gradients[i][start:stop] for i, start, stop in used])
    whole = [block_norms(list(blocks_of(g))) if i != 1 else torch.zeros(1) for i, g in enumerate(gradients)]
    for table in ranks:
        assert torch.equal(table.norms, torch.cat([norms.double() for norms in whole]))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_norms_of_small_types_are_computed_in_float32():
    blocks = [torch.full((5,), 40000.0, dtype=dtype) for dtype in (torch.float16, torch.complex32, torch.complex64)]
    assert block_norms(blocks).tolist() == pytest.approx([40000 * 5**0.5] * 3)


@pytest.mark.parametrize("value", [3.0, float("inf"), float("nan")])
def test_an_overflow_is_found_and_told_to_the_scaler(value):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    gradients = [torch.tensor([8.0, 16.0]), torch.tensor([value * 8])]
    found = unscale(gradients, scaler)
    assert found.item() == float(value != 3.0)
    assert gradients[0].tolist() == [1.0, 2.0]
    note(scaler, found)
    scaler.update()
    assert scaler.get_scale() == (8.0 if value == 3.0 else 4.0)
