"""What is expected of schedules: the fastest is chosen, no bound is beaten, and advice holds."""

from __future__ import annotations

import itertools
import random

import pytest

from unisono.parallel.pipeline.balance import ModelSegment
from unisono.parallel.pipeline.expectation import expect, fastest, least_step, more_micro_batches
from unisono.parallel.pipeline.schedule import StageCost, make_schedule
from unisono.parallel.pipeline.schedule_timeline import simulate
from unisono.parallel.pipeline.stage_link import NO_DELAY, StageLink


def row(*seconds, state_nbytes=0, activation_nbytes=0, entering_nbytes=0):
    return [
        ModelSegment(f"{place}", forward_s, backward_s, state_nbytes, activation_nbytes, entering_nbytes)
        for place, (forward_s, backward_s) in enumerate(seconds)
    ]


def choose(
    segments,
    *,
    stages=4,
    micro_batches=8,
    limit_nbytes=None,
    schedules=("1f1b", "zero-bubble", "eager-1f1b"),
    link=NO_DELAY,
):
    return fastest(
        segments,
        stages=stages,
        schedules=schedules,
        ranks=stages,
        micro_batches=micro_batches,
        limit_nbytes=limit_nbytes,
        link=link,
    )


def test_long_passes_are_divided_and_short_ones_are_not():
    assert choose(row(*[(0.1, 0.2)] * 8)).schedule == "zero-bubble"
    assert choose(row(*[(1e-4, 2e-4)] * 8)).schedule == "1f1b"
    assert choose(row(*[(0.1, 0.2)] * 8), micro_batches=1000).schedule == "1f1b"  # no waits that are worth it


def test_a_schedule_that_takes_too_much_memory_is_not_chosen():
    segments = row(*[(0.1, 0.2)] * 8, activation_nbytes=100)
    assert choose(segments, limit_nbytes=800).schedule == "zero-bubble"
    # 4 micro-batches of 2 parts everywhere take 800 bytes; with 1F1B, the last stages take less, and may be larger.
    uneven = [*segments[:-1], segments[-1]._replace(state_nbytes=500)]
    assert choose(uneven, limit_nbytes=900).schedule == "1f1b"
    with pytest.raises(ValueError, match=r"no division into 4 stages fits 9.54e-05 MiB each"):
        choose(segments, limit_nbytes=100)


def test_slow_messages_make_more_micro_batches_be_under_way():
    segments = row(*[(0.01, 0.02)] * 4, activation_nbytes=100, entering_nbytes=1000)
    slow = StageLink(1e-3, 1e-5)  # 11 ms
    found = choose(segments, micro_batches=32, link=slow)
    assert found.schedule == "eager-1f1b"
    assert found.transfer_s == pytest.approx(0.011)
    usual = choose(segments, micro_batches=32, link=slow, schedules=["1f1b"])
    assert usual.timeline.duration > 1.2 * found.timeline.duration
    # The first stage keeps 7 micro-batches then, instead of 4.
    assert choose(segments, micro_batches=32, link=slow, limit_nbytes=699).schedule == "zero-bubble"
    assert choose(segments, micro_batches=32, link=slow, limit_nbytes=700).schedule == "eager-1f1b"
    # What saves less than 2 % is not worth the memory.
    assert choose(segments, micro_batches=32, link=StageLink(1e-4, 0.0)).schedule == "1f1b"


def test_gpipe_is_never_faster_than_1f1b():
    rng = random.Random(0)
    for _ in range(200):
        ranks, micro_batches = rng.randint(2, 6), rng.randint(1, 24)
        costs = [StageCost(rng.uniform(0.5, 1.5), *[rng.uniform(0.2, 1.5)] * 2) for _ in range(ranks)]
        took = [
            simulate(make_schedule(name, ranks=ranks, micro_batches=micro_batches), costs).duration
            for name in ("1f1b", "gpipe")
        ]
        assert took[0] <= took[1] * (1 + 1e-9)


@pytest.mark.parametrize(("stages", "ranks"), [(2, 2), (3, 3), (4, 4), (4, 2), (6, 3)])
def test_no_division_and_no_schedule_is_faster_than_the_bound(stages, ranks):
    rng = random.Random(stages)
    names = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble") if ranks == stages else ("interleaved",)
    for _ in range(5):
        count, micro_batches = rng.randint(stages, stages + 4), rng.randint(1, 9)
        segments = row(*((rng.uniform(0.1, 2), rng.uniform(0.1, 3)) for _ in range(count)))
        bound = least_step(segments, stages=stages, ranks=ranks, micro_batches=micro_batches)
        shortest = float("inf")
        for cuts, name in itertools.product(itertools.combinations(range(1, count), stages - 1), names):
            parts = [segments[begin:end] for begin, end in itertools.pairwise((0, *cuts, count))]
            costs = [
                StageCost(sum(each.forward_s for each in part), *[sum(each.backward_s for each in part) / 2] * 2)
                for part in parts
            ]
            made = make_schedule(name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=stages // ranks)
            shortest = min(shortest, simulate(made, costs).duration)
        assert bound <= shortest * (1 + 1e-9)
        assert bound >= 0.5 * shortest or micro_batches < 4  # and it says something


def test_advice_is_the_first_doubling_with_which_ranks_wait_little():
    expected = expect(row(*[(0.1, 0.2)] * 4), make_schedule("1f1b", ranks=4, micro_batches=8), "1f1b")
    advice = more_micro_batches(expected, ranks=4, micro_batches=8)
    assert advice.micro_batches == 32
    assert advice.waiting == pytest.approx(3 / 35)
    assert more_micro_batches(expect(row((1, 2)) * 2, make_schedule("1f1b", ranks=2, micro_batches=16), "1f1b"),
                              ranks=2, micro_batches=16) is None  # fmt: skip
    unequal = expect(row((1, 2), (3, 6)), make_schedule("1f1b", ranks=2, micro_batches=8), "1f1b")
    assert more_micro_batches(unequal, ranks=2, micro_batches=8) is None
