"""Every element of every parameter has one owner, and the work is divided evenly."""

from __future__ import annotations

import random

import pytest

from unisono.engine.shared.partition import assign_whole, partition


@pytest.mark.parametrize("seed", range(40))
def test_each_element_belongs_to_one_rank(seed):
    rng = random.Random(seed)
    numels = [rng.choice([1, 3, 64, 1000, 5000, 40000]) for _ in range(rng.randint(1, 20))]
    ranks, unit = rng.randint(1, 9), 512
    for parts in (partition(numels, ranks=ranks, unit=unit), assign_whole(numels, ranks=ranks)):
        assert len(parts) == ranks
        owned = [[] for _ in numels]
        for pieces in parts:
            for index, start, stop in pieces:
                assert start < stop
                owned[index].append((start, stop))
        for numel, runs in zip(numels, owned, strict=True):
            runs.sort()
            assert [0, *(stop for _, stop in runs)] == [*(start for start, _ in runs), numel]
    for pieces in partition(numels, ranks=ranks, unit=unit):
        assert all(start % unit == 0 and (stop % unit == 0 or stop == numels[i]) for i, start, stop in pieces)


def test_a_parameter_with_fewer_units_than_ranks_has_no_empty_pieces():
    """A piece without elements was made where two cuts fell together within a parameter."""
    for numels in ([19200, 300], [600], [1000, 0, 1000], [0, 600, 0]):
        for ranks in range(1, 9):
            pieces = [
                piece for own in partition(numels, ranks=ranks, unit=512 if 600 in numels else 16384) for piece in own
            ]
            assert [i for i, start, stop in pieces if start == stop] == [
                i for i, numel in enumerate(numels) if not numel
            ]
            assert sum(stop - start for _, start, stop in pieces) == sum(numels)


def test_large_parameters_are_divided_to_within_a_unit():
    sizes = [
        sum(stop - start for _, start, stop in pieces) for pieces in partition([10**6, 10**6], ranks=4, unit=16384)
    ]
    assert max(sizes) - min(sizes) <= 2 * 16384


def test_whole_parameters_are_balanced_by_size():
    loads = [sum(stop for _, _, stop in pieces) for pieces in assign_whole([70, 10, 60, 50, 20, 30], ranks=3)]
    assert sorted(loads) == [80, 80, 80]
