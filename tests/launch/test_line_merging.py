"""Equal lines of several ranks become one line; each rank's own lines stay in order and complete."""

import random

import pytest

from unisono.launch.output.line_merging import LineMerger
from unisono.text import format_ranks


def lines_of(folds, rank):
    return [(fold.stream, fold.line) for fold in folds if rank in fold.ranks]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("kinds", [1, 3, 1000])
def test_nothing_is_lost_and_no_rank_is_reordered(ranks, kinds):
    generator = random.Random(f"{ranks} {kinds}")
    for _ in range(60):
        folder = LineMerger(hold_s=0.1, limit=generator.choice([1000, 100_000]))
        printed = {rank: [] for rank in range(ranks)}
        running = set(printed)
        folds = folder.expect(running)
        now_s = 0.0
        for _ in range(80):
            rank, stream = generator.randrange(ranks), generator.randrange(2)
            lines = [b"line %d" % generator.randrange(kinds) for _ in range(generator.randint(1, 4))]
            now_s += generator.choice([0.0, 0.01, 0.2])
            if generator.random() < 0.3:
                folds += folder.due(now_s)
            elif generator.random() < 0.05:
                folds += folder.release(rank)
                assert lines_of(folds, rank) == printed[rank]
            elif generator.random() < 0.05:
                running.discard(rank)
                folds += folder.expect(running)
            if rank in running:
                printed[rank] += [(stream, line) for line in lines]
                folds += folder.add(rank, stream, lines, now_s)
        folds += folder.flush()
        assert folder.deadline_s is None and folder.flush() == []
        for rank, expected in printed.items():
            assert lines_of(folds, rank) == expected
        assert all(fold.ranks for fold in folds)


def test_what_all_ranks_print_is_printed_once():
    folder = LineMerger(hold_s=0.1)
    folder.expect(range(8))
    folds = []
    for rank in random.Random(0).sample(range(8), 8):
        folds += folder.add(rank, 0, [b"epoch 1", b"own %d" % rank, b"saved"], now_s=0.0)
    folds += folder.flush()
    shown = [(format_ranks(fold.ranks), fold.line) for fold in folds]
    assert len(shown) == 10
    assert shown[0] == ("0-7", b"epoch 1")
    assert shown[-1] == ("0-7", b"saved")


def test_a_line_that_no_rank_can_join_is_not_held():
    folder = LineMerger(hold_s=0.1)
    folder.expect({0, 1})
    assert folder.add(0, 0, [b"loss 1", b"saved"], now_s=0.0) == []
    assert folder.add(1, 0, [b"loss 2"], now_s=0.0) == []
    # Both ranks are past their own lines now.
    assert [fold.line for fold in folder.add(1, 0, [b"saved"], now_s=0.0)] == [b"loss 1", b"loss 2", b"saved"]


def test_a_line_of_a_rank_that_has_ended_waits_for_nobody():
    folder = LineMerger(hold_s=0.1)
    folder.expect({0, 1})
    assert folder.add(0, 0, [b"last words"], now_s=0.0) == []
    assert [fold.line for fold in folder.expect(set())] == [b"last words"]


def test_a_rank_alone_is_not_held():
    folder = LineMerger(hold_s=0.1)
    folder.expect({3})
    assert [fold.line for fold in folder.add(3, 0, [b"a", b"a"], now_s=0.0)] == [b"a", b"a"]


def test_no_line_is_held_longer_than_promised():
    folder = LineMerger(hold_s=0.1)
    folder.expect({0, 1, 2})
    folder.add(0, 0, [b"a"], now_s=1.0)
    folder.add(1, 0, [b"a"], now_s=1.05)
    assert folder.deadline_s == pytest.approx(1.1)
    assert folder.due(1.09) == []
    assert [fold.ranks for fold in folder.due(1.11)] == [{0, 1}]
    folder.add(0, 0, [b"b"], now_s=2.0)
    folder.add(1, 0, [b"own", b"b"], now_s=2.05)
    assert [(fold.line, fold.ranks) for fold in folder.due(2.11)] == [(b"own", {1}), (b"b", {0, 1})]


def test_equal_lines_on_different_streams_stay_apart():
    folder = LineMerger(hold_s=0.1)
    folder.expect({0, 1})
    folds = folder.add(0, 0, [b"a"], now_s=0.0) + folder.add(1, 1, [b"a"], now_s=0.0) + folder.flush()
    assert [(fold.stream, fold.ranks) for fold in folds] == [(0, {0}), (1, {1})]


def test_what_is_held_does_not_fill_the_memory():
    folder = LineMerger(hold_s=0.1, limit=3000)
    folder.expect({0, 1})
    given = sum(len(folder.add(0, 0, [b"%0100d" % number], now_s=0.0)) for number in range(10_000))
    assert given >= 9990
