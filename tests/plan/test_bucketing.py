"""Tensors are divided into buckets of one type and device, each item in exactly one, within the limits."""

from __future__ import annotations

import itertools
import random

import pytest

from unisono.plan.bucketing import Item, group_by_size


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("exceed", [False, True])
def test_every_item_is_in_one_bucket_of_its_kind_and_size(seed, exceed):
    random.seed(seed)
    items = [Item(random.randrange(40), random.choice("ab"), random.choice("xyz")) for _ in range(200)]
    buckets = group_by_size(items, limit_nbytes=60, exceed=exceed)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(200))
    assert [bucket[-1] for bucket in buckets] == sorted(bucket[-1] for bucket in buckets)
    last = {}
    for bucket in buckets:
        assert bucket == sorted(bucket)
        kind = {items[i][1:] for i in bucket}
        assert len(kind) == 1
        sizes = [items[i].nbytes for i in bucket]
        if exceed:
            assert sum(sizes[:-1]) < 60
        else:
            assert sum(sizes) <= 60 or len(sizes) == 1
        last.setdefault(kind.pop(), []).append(bucket)
    for of_kind in last.values():  # full buckets only, but for the last
        for bucket, following in itertools.pairwise(of_kind):
            more = 0 if exceed else items[following[0]].nbytes
            assert sum(items[i].nbytes for i in bucket) + more >= 60


def test_the_first_bucket_of_a_device_is_smaller():
    items = [Item(10, "a", "x"), Item(10, "a", "y"), Item(10, "a", "x"), Item(10, "b", "x"), Item(10, "a", "x")]
    assert group_by_size(items, limit_nbytes=20, first_nbytes=10, exceed=True) == [[0], [1], [3], [2, 4]]
    assert group_by_size(items, limit_nbytes=5, first_nbytes=10, exceed=True) == [[0], [1], [2], [3], [4]]


def test_nothing_makes_no_bucket():
    assert group_by_size([], limit_nbytes=1) == []
