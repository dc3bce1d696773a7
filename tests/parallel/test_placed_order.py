"""Micro-batches that are computed one after the other keep GPUs as busy as an order made for it: by simulation.

A GPU computes what it was given, in order, while the program goes on. A copy runs on its source, and waits for all that
its target has been given until then, as torch's do.
"""

from __future__ import annotations

import pytest


def simulate(order: list[tuple[int, int]], seconds: list[float], *, launch_s: float, copy_s: float) -> float:
    """Return the time until all is computed: layers on devices 0, 1, … of micro-batches, called in some order.

    Args:
        order: Pairs of device and micro-batch.
        seconds: What each device computes for one micro-batch.
        launch_s: What the program needs for each call.
        copy_s: What a copy to the next device takes.
    """
    now, free, ready = 0.0, [0.0] * len(seconds), {}
    for device, micro_batch in order:
        now += launch_s
        free[device] = max(free[device], now, ready.get((device, micro_batch), 0.0)) + seconds[device]
        if device + 1 < len(seconds):
            end = max(free[device], free[device + 1]) + copy_s
            free[device] = end
            ready[device + 1, micro_batch] = end
    return max(free)


def in_turn(devices: int, micro_batches: int) -> list[tuple[int, int]]:
    """Return the order of `place`: each micro-batch through all layers."""
    return [(device, number) for number in range(micro_batches) for device in range(devices)]


def wavefront(devices: int, micro_batches: int) -> list[tuple[int, int]]:
    """Return the order of a pipeline: in each round the next layers of all micro-batches under way."""
    rounds = range(devices + micro_batches - 1)
    return [(r - n, n) for r in rounds for n in range(micro_batches) if 0 <= r - n < devices]


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("slowest", [0, 1, -1, None])
def test_one_after_the_other_is_as_fast_as_a_wavefront(devices, slowest):
    seconds = [1.0] * devices
    if slowest is not None:
        seconds[slowest] = 2.0
    for micro_batches in (1, 2, 8, 32):
        ours, best = (
            simulate(order(devices, micro_batches), seconds, launch_s=0.0, copy_s=0.01)
            for order in (in_turn, wavefront)
        )
        assert ours == pytest.approx(best)
        if slowest is None:
            assert ours == pytest.approx(micro_batches + devices - 1, rel=0.02)  # the least there is
        # While the program needs less time for all calls of a micro-batch than a device for its part, nothing is lost
        # but a start: a device begins once the calls before it have been made.
        launched = [
            simulate(order(devices, micro_batches), seconds, launch_s=0.1, copy_s=0.01)
            for order in (in_turn, wavefront)
        ]
        assert launched[0] <= launched[1] + 0.1 * devices


def test_two_devices_have_the_same_order_either_way():
    assert in_turn(2, 5) == wavefront(2, 5)
