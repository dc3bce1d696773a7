"""All ways to lay out rows end with the sum that the tree asks for, to the bit."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from unisono.engine.norm import BLOCK
from unisono.engine.shared import paired_rows
from unisono.engine.shared.batched_rows import BatchedRows
from unisono.engine.shared.direct_rows import DirectRows
from unisono.engine.shared.paired_rows import PairedRows
from unisono.engine.shared.partition import partition
from unisono.engine.tree_all_reduce import NodeLayouts
from unisono.plan import fold

_SHAPES = [(3, 5), (BLOCK + 7,), (), (2 * BLOCK,), (0, 4), (40, 1000)]
_VIRTUAL_RANKS = 8


def _sums(gradients, layout, factor):
    """What every parameter's gradient must be; None counts as zero."""
    sums = []
    for k, shape in enumerate(_SHAPES):
        values = {node: torch.zeros(shape) if g[k] is None else g[k].clone() for node, g in gradients.items()}
        total = fold(values, leaves=layout.leaves, add=torch.add)
        sums.append(total * factor if factor != 1.0 else total)
    return sums


def _bits(tensor):
    return (tensor + 0.0).contiguous().numpy().tobytes()  # a sum with zero may be -0.0 or 0.0


@pytest.mark.parametrize("kind", [DirectRows, BatchedRows, PairedRows])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_end_with_the_sum_of_the_tree(kind, size, make_runtimes, run_threads, monkeypatch):
    monkeypatch.setattr(paired_rows, "_PIECE", 1000)
    generator = torch.Generator().manual_seed(size)
    parameters = [torch.zeros(shape) for shape in _SHAPES]
    parts = partition([p.numel() for p in parameters], ranks=size, unit=BLOCK)
    layouts = NodeLayouts(size, virtual_ranks=_VIRTUAL_RANKS)
    ranks = [kind(runtime, parameters, parts, widest=layouts.widest) for runtime in make_runtimes(size)]
    for attempt, (leaves, factor) in enumerate([(8, 1.0), (5, 0.3), (8, 0.25)], start=1):
        layout = layouts.of(leaves)
        nodes = [node for of_rank in layout.nodes for node in of_rank]
        gradients = {
            node: [
                None if (k + n) % 5 == attempt else torch.randn(shape, generator=generator)
                for k, shape in enumerate(_SHAPES)
            ]
            for n, node in enumerate(nodes)
        }
        expected = _sums(gradients, layout, factor)

        def write(rank, layout=layout, gradients=gradients, attempt=attempt):
            rows = ranks[rank]
            rows.start(layout, attempt)
            for i, node in enumerate(layout.nodes[rank]):
                rows.put_all(i, [None if g is None else g.clone() for g in gradients[node]])
            rows.flush()

        run_threads(write, size)
        run_threads(lambda rank, factor=factor: ranks[rank].reduce([True] * len(_SHAPES), factor), size)
        for rows in ranks:
            assert [_bits(g) for g in rows.gradients] == [_bits(g) for g in expected]


@pytest.mark.parametrize("kind", [DirectRows, BatchedRows, PairedRows])
def test_the_sum_of_two_gradients_is_taken_like_one(kind, make_runtimes):
    shapes = [(BLOCK + 3,), (2, 7)]
    parameters = [torch.zeros(shape) for shape in shapes]
    parts = partition([p.numel() for p in parameters], ranks=2, unit=BLOCK)
    layouts = NodeLayouts(2, virtual_ranks=2)
    ranks = [kind(runtime, parameters, parts, widest=layouts.widest) for runtime in make_runtimes(2)]
    for rows in ranks:
        rows.start(layouts.widest, 1)
        for index, shape in enumerate(shapes):
            rows.put_sum(0, index, torch.full(shape, 1.0), torch.full(shape, 2.0 + rows.rank))
        rows.flush()
    for rows in ranks:
        rows.reduce([True, True], 1.0)
    for gradient in ranks[0].gradients:
        assert gradient.eq(7.0).all()


def test_of_two_that_hold_a_lock_one_comes_first_in_each_step(make_runtimes, run_threads):
    runtimes, together = make_runtimes(2), threading.Barrier(2)
    locks = [paired_rows._Locks(runtime, 3) for runtime in runtimes]
    firsts = [[], []]
    inside = []

    def work(rank):
        for attempt in range(1, 301):
            together.wait(10)
            with locks[rank].hold(1, 1 - rank):
                inside.append(rank)
                if locks[rank].comes_first(1, attempt):
                    firsts[rank].append(attempt)
                assert inside == [rank]
                inside.clear()

    run_threads(work, 2)
    assert sorted(firsts[0] + firsts[1]) == [*range(1, 301)]


def test_a_lock_that_is_held_is_waited_for(make_runtimes):
    runtimes = make_runtimes(2)
    locks = [paired_rows._Locks(runtime, 2) for runtime in runtimes]
    waits = []
    runtimes[1].wait_for_semaphore = lambda semaphore, rank, what: waits.append((rank, semaphore.try_wait()))
    with locks[0].hold(0, 1):
        with locks[1].hold(1, 0):  # another one is free
            pass
        with locks[1].hold(0, 0):
            pass
    assert waits == [(0, False)]


@pytest.mark.parametrize("kind", [DirectRows, PairedRows])
def test_rows_that_take_turns_keep_nothing_that_a_step_has_made(kind, make_runtimes):
    """It would lie among the tensors of the step, which then leave holes: 45 MB for a model of a million parameters."""
    parameters = [torch.zeros(shape) for shape in _SHAPES]
    parts = partition([p.numel() for p in parameters], ranks=3, unit=BLOCK)
    layout = NodeLayouts(3, virtual_ranks=_VIRTUAL_RANKS).widest
    ranks = [kind(runtime, parameters, parts, widest=layout, spare=2) for runtime in make_runtimes(3)]
    turns = [[rows, rows.turned(0), rows.turned(1)] for rows in ranks]
    for rows in (rows for of_rank in turns for rows in of_rank):
        rows.prepare()

    def tensors():
        gc.collect()
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    before = tensors()
    for attempt in range(1, 4):
        for of_rank in turns:
            rows = of_rank[attempt - 1]
            rows.start(layout, attempt)
            for i in range(len(layout.nodes[rows.rank])):
                rows.put_all(i, [torch.ones(shape) for shape in _SHAPES])
            rows.flush()
        for of_rank in turns:
            of_rank[attempt - 1].reduce([True] * len(_SHAPES), 1.0)
            of_rank[attempt - 1].forget()
    assert tensors() == before
    nodes = sum(map(len, layout.nodes))
    assert all(gradient.eq(nodes).all() for gradient in turns[0][2].gradients)
