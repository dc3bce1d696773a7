"""The automatic split is the best of all divisions, found by brute force, and keeps a limit of memory."""

from __future__ import annotations

import itertools
import random

import pytest

from unisono.parallel.pipeline.balance import ModelSegment, balance


def all_divisions(count, stages):
    return ((0, *cuts) for cuts in itertools.combinations(range(1, count), stages - 1))


def cost(segments, begins, under_way):
    ends = (*begins[1:], len(segments))
    runs = [segments[begin:end] for begin, end in zip(begins, ends, strict=True)]
    seconds = [sum(each.forward_s + each.backward_s for each in run) for run in runs]
    nbytes = [
        sum(each.state_nbytes for each in run) + held * sum(each.activation_nbytes for each in run)
        for run, held in zip(runs, under_way, strict=True)
    ]
    return seconds, nbytes, sum(segments[begin].entering_nbytes for begin in begins[1:])


@pytest.mark.parametrize("seed", range(40))
def test_the_split_is_the_best_of_all(seed):
    rng = random.Random(seed)
    segments = [
        ModelSegment(
            f"{i}",
            rng.choice([0.1, 1.0, 5.0]) * rng.random(),
            rng.random(),
            rng.randrange(1000),
            rng.randrange(300),
            rng.randrange(100),
        )
        for i in range(rng.randint(1, 9))
    ]
    stages = rng.randint(1, min(5, len(segments)))
    under_way = [stages - stage for stage in range(stages)]
    known = {begins: cost(segments, begins, under_way) for begins in all_divisions(len(segments), stages)}
    limit = rng.choice([None, rng.choice([max(nbytes) for _, nbytes, _ in known.values()])])
    fitting = {begins: each for begins, each in known.items() if limit is None or max(each[1]) <= limit}
    fastest = min(max(seconds) for seconds, _, _ in fitting.values())
    found = balance(segments, stages, under_way=under_way, limit_nbytes=limit)

    seconds, nbytes, sent = known[found.begins]
    assert found.seconds == pytest.approx(seconds)
    assert list(found.nbytes) == nbytes
    assert found.begins in fitting
    assert max(seconds) <= fastest * 1.01 * (1 + 1e-9)
    assert sent <= min(each[2] for each in fitting.values() if max(each[0]) <= fastest * 1.01 * (1 - 1e-9))
    assert found.least_s == pytest.approx(min(max(seconds) for seconds, _, _ in known.values()))
    assert found.excess == pytest.approx(max(seconds) / found.least_s - 1)


def test_what_cannot_be_divided_is_refused_with_numbers():
    segments = [ModelSegment(f"{i}", 1.0, 2.0, 3 << 20, 1 << 20, 0) for i in range(4)]
    with pytest.raises(ValueError, match="5 stages need 5 places at which one may begin, and the model has 4"):
        balance(segments, 5, under_way=[5, 4, 3, 2, 1])
    with pytest.raises(ValueError, match=r"into 2 stages fits 7 MiB each: the best one needs 10 MiB"):
        balance(segments, 2, under_way=[2, 1], limit_nbytes=7 << 20)
