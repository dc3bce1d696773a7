"""Schedules of pipelines: valid for all numbers of stages and micro-batches, and as fast as their papers say."""

from __future__ import annotations

import itertools
import random

import pytest

from unisono.parallel.pipeline.schedule import SCHEDULES, Schedule, StageCost, check_schedule, make_schedule
from unisono.parallel.pipeline.schedule_timeline import draw, simulate

EQUAL = StageCost(1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_each_pass_once_and_ends(name):
    rng = random.Random(name)
    for ranks in (1, 2, 3, 4, 7):
        for micro_batches in (0, 1, 2, 3, 5, 8, 13):
            per_rank = rng.randint(1, 3) if name in ("interleaved", "breadth-first") else 1
            costs = [StageCost(*(rng.uniform(0.1, 3) for _ in range(3))) for _ in range(ranks * per_rank)]
            found = make_schedule(name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=per_rank)
            check_schedule(found)
            assert simulate(found, costs).duration >= max(
                micro_batches * sum(sum(cost) for cost in costs[rank::ranks]) for rank in range(ranks)
            ) * (1 - 1e-9)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_steps_take_as_long_as_the_papers_say(ranks, rounds):
    micro_batches = ranks * rounds

    def duration(name, per_rank=1):
        made = make_schedule(name, ranks=ranks, micro_batches=micro_batches, stages_per_rank=per_rank)
        return simulate(made, [StageCost(*(each / per_rank for each in EQUAL))] * ranks * per_rank).duration

    work = 3 * micro_batches
    of_1f1b = work + 3 * (ranks - 1)
    assert duration("gpipe") == duration("1f1b") == duration("eager-1f1b") == duration("interleaved") == of_1f1b
    assert duration("interleaved", 2) == pytest.approx(work + 3 * (ranks - 1) / 2)
    assert duration("interleaved", 3) == pytest.approx(work + 3 * (ranks - 1) / 3)
    assert duration("breadth-first", 2) == pytest.approx(work + 3 * (ranks - 1) / 2)
    assert duration("breadth-first", 3) == pytest.approx(work + 3 * (ranks - 1) / 3)
    assert duration("zero-bubble") == work + (ranks - 1)


def test_schedules_hold_as_many_activations_as_their_papers_say():
    def held(name, per_rank=1):
        made = make_schedule(name, ranks=4, micro_batches=16, stages_per_rank=per_rank)
        return simulate(made, [EQUAL] * 4 * per_rank).most_under_way

    assert held("gpipe") == (16, 16, 16, 16)
    assert held("1f1b") == held("interleaved") == (4, 3, 2, 1)
    assert held("eager-1f1b") == (7, 5, 3, 1)
    assert held("interleaved", 2) == (11, 9, 7, 5)
    assert held("zero-bubble") == (4, 4, 4, 4)
    assert held("breadth-first", 2) == (32, 32, 32, 32)


def test_with_breadth_first_a_rank_turns_to_each_stage_once_in_each_direction():
    made = make_schedule("breadth-first", ranks=2, micro_batches=3, stages_per_rank=2)
    (_, of_last) = made.actions
    turns = [key for key, _ in itertools.groupby(of_last, lambda action: action[:2])]
    assert turns == [("forward", 1), ("forward", 3), ("backward", 3), ("backward", 1)]


def test_transfers_and_waits_are_in_the_model():
    made = make_schedule("1f1b", ranks=2, micro_batches=1)
    found = simulate(made, [EQUAL] * 2, transfer=0.5)
    assert found.duration == 7.0  # two stages of 3, and two transfers
    assert found.bubble == pytest.approx(1 - 6 / 14)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("transfer", [0.25, 1.0, 1.5])
def test_with_eager_1f1b_messages_travel_while_ranks_compute(ranks, transfer):
    def duration(name, micro_batches):
        made = make_schedule(name, ranks=ranks, micro_batches=micro_batches)
        return simulate(made, [EQUAL] * ranks, transfer=transfer).duration

    # Each further micro-batch takes the time of its passes; with 1F1B, that of two messages for every other one, too.
    once = duration("eager-1f1b", 1)
    assert once == duration("1f1b", 1) == 3 * ranks + 2 * transfer * (ranks - 1)
    for micro_batches in (8, 16, 64):
        assert duration("eager-1f1b", micro_batches) == once + 3 * (micro_batches - 1)
        assert duration("1f1b", micro_batches) >= once + 3 * (micro_batches - 1) + transfer * (micro_batches - ranks)


def test_wrong_schedules_are_refused():
    with pytest.raises(ValueError, match="schedule='1F1B' must be one of 'gpipe', '1f1b', 'eager-1f1b'"):
        make_schedule("1F1B", ranks=2, micro_batches=4)
    with pytest.raises(
        ValueError, match='there are 4 stages on 2 ranks: give schedule="interleaved" or "breadth-first"'
    ):
        make_schedule("1f1b", ranks=2, micro_batches=4, stages_per_rank=2)

    made = make_schedule("1f1b", ranks=2, micro_batches=3)
    first, second = made.actions

    def changed(*actions):
        return Schedule(actions, made.stage_ranks, made.micro_batches)

    with pytest.raises(ValueError, match="backward of micro-batch 0 on stage 0 is missing"):
        check_schedule(changed((), ()))
    with pytest.raises(ValueError, match="forward of micro-batch 2 on stage 0 is not next"):
        check_schedule(changed((first[3], *first), second))
    with pytest.raises(ValueError, match="rank 0 waits for ever before backward of micro-batch 0 on stage 0"):
        check_schedule(changed((first[0], first[2], *first), second[:1]))
    with pytest.raises(ValueError, match="on rank 1, and its stage is on another one"):
        check_schedule(changed(second, first))


def test_a_drawing_has_a_line_for_each_rank_and_is_in_time():
    made = make_schedule("zero-bubble", ranks=3, micro_batches=4)
    lines = draw(simulate(made, [EQUAL] * 3), columns=56).splitlines()
    assert [line[:7] for line in lines] == ["rank 0 ", "rank 1 ", "rank 2 "]
    assert len({len(line) for line in lines}) == 1
    assert [lines[0].count(letter) for letter in "FIW"] == [4, 4, 4]
