"""Which parameters share a bucket, and how that follows what backward passes use."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from unisono.parallel.bucket_plan import BucketPlan
from unisono.parallel.buffer_sync import Buffers
from unisono.parallel.gradient_bucket import Parameter
from unisono.parallel.trailer import RoundSummary


def plan_of(sizes, *, sparse=(), limit=400, first=400, every=False, static=False):
    parameters = [
        Parameter(str(i), nn.Parameter(torch.empty(size)), sparse=i in sparse) for i, size in enumerate(sizes)
    ]
    buffers = Buffers(nn.Module(), "broadcast")
    return BucketPlan(
        parameters,
        buffers,
        limit_nbytes=limit,
        first_nbytes=first,
        ranks=2,
        every=every,
        static=static,
        trailer_rides=True,
    )


def after(used, *, late=()):
    return RoundSummary(active=(0, 1), used=frozenset(used), late=frozenset(late), changed=())


def members(buckets):
    return [bucket.members for bucket in buckets]


@pytest.mark.parametrize("seed", range(10))
def test_each_dense_parameter_has_one_place(seed):
    random.seed(seed)
    sizes = [random.randrange(1, 80) for _ in range(30)]
    sparse = {i for i in range(30) if random.random() < 0.1}
    plan = plan_of(sizes, sparse=sparse)
    assert sorted(i for bucket in plan.buckets for i in bucket.members) == sorted({*range(30)} - sparse)
    for i in range(30):
        bucket = plan.bucket_of[i]
        assert (bucket is None) == (i in sparse)
        assert bucket is None or bucket.members[plan.slot[i]] == i


def test_buckets_follow_the_order_of_the_first_backward():
    plan = plan_of([50, 50, 50, 50])
    assert members(plan.buckets) == [[3, 2], [1, 0]]
    plan.learn(after({0, 1, 2, 3}), first=True, order=lambda: [0, 3, 1, 2])
    assert members(plan.buckets) == members(plan.travelling) == [[0, 3], [1, 2]]


def test_the_trailer_lies_behind_the_last_bucket():
    plan = plan_of([50, 50, 50, 50])
    assert plan.trailer_bucket is plan.travelling[-1]
    assert [bucket.trailer_numel for bucket in plan.buckets] == [0, plan.trailer.numel]


def test_parameters_without_gradients_stop_travelling_and_come_back():
    plan = plan_of([100, 100, 100])
    plan.learn(after({0, 1}), first=True, order=lambda: [1, 0])
    assert members(plan.buckets) == [[1], [0], [2]] and members(plan.travelling) == [[1], [0]]
    plan.learn(after({0, 1, 2}), first=False, order=list)
    assert members(plan.travelling) == [[1], [0], [2]]
    for _ in range(8):
        plan.learn(after({0, 1}), first=False, order=list)
    assert members(plan.travelling) == [[1], [0]]


def test_every_bucket_travels_where_that_is_asked_for():
    plan = plan_of([100, 100], every=True)
    for first in (True, *[False] * 10):
        plan.learn(after({0}), first=first, order=lambda: [0])
    assert members(plan.travelling) == [[0], [1]]


def test_a_round_as_expected_is_remembered():
    plan = plan_of([10, 10])
    summary = after({0, 1})
    plan.learn(summary, first=False, order=list)
    assert plan.settled is summary
    late = plan_of([10, 10])
    late.learn(after({0, 1}, late={1}), first=False, order=list)
    assert late.settled is None
