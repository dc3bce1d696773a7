"""How much longer ranks take that compute at the same time."""

from __future__ import annotations

import pytest
import torch

from unisono.errors import EstimateError
from unisono.estimate.costs import Machine
from unisono.estimate.crowding import Load, crowding
from unisono.estimate.operator_times import OperatorTimes, time_beside_operators
from unisono.machine import usable_cores


def product():
    left = torch.ones(128, 128)
    return lambda: left @ left


def failure():
    raise RuntimeError("a load that cannot be made")


def test_what_waits_for_a_core_does_not_count():
    assert 1 <= crowding([Load(product, 3)], 4 * usable_cores()) < 3
    assert crowding([Load(product, 1)], 1) == crowding([], 4) == 1


def test_a_process_that_ends_is_an_error():
    with pytest.raises(EstimateError, match="one of 2 processes that computed at the same time ended"):
        crowding([Load(failure, 1)], 2)


def test_ranks_beyond_the_cores_take_turns():
    machine = Machine(
        base_nbytes=0,
        replay=lambda _: None,
        memory_bytes_per_s=1,
        page_bytes_per_s=1,
        link_bytes_per_s=1,
        cores=2,
        slowdown=1.5,
        memory_slowdown=2,
    )
    assert [machine.crowded_s(ranks, computing_s=10, moving_s=1) for ranks in (1, 2, 4)] == [11, 17, 34]


def test_operators_that_take_most_stand_for_a_model():
    times = OperatorTimes()
    large, small = torch.ones(200, 200), torch.ones(2, 2)
    for tensor in (small, large, large):
        times.seconds(torch.ops.aten.mm.default, (tensor, tensor), {}, tensor)
    assert [load.calls for load in times.loads()] == [2, 1]
    assert times.loads()[0].make()().shape == (200, 200)
    assert times.calls == 3


def test_operators_are_noted_and_timed_together():
    times = OperatorTimes()
    large, small = torch.ones(300, 300), torch.ones(2, 2)
    noted = [times.note(torch.ops.aten.mm.default, (each, each), {}, each) for each in (large, large, small)]
    assert noted[0] is noted[1] is not noted[2]
    assert times.note(torch.ops.aten.t.default, (small,), {}, small) is None  # a view takes no memory
    assert times.sum_of(noted) == 0
    times.measure()
    assert times.sum_of(noted[:1]) > times.sum_of(noted[2:]) > 0


def test_an_operator_takes_little_longer_in_a_model_than_by_itself():
    assert 0 <= time_beside_operators() < 5e-3
