import math

import pytest

from unisono.state.policy import Checkpoints, is_due


def test_nothing_is_due_before_a_step():
    policy = Checkpoints(every_steps=1, every_minutes=0.01)
    assert not is_due(policy, steps_since=0, seconds_since=1e9, epoch_ended=True)


def test_each_rule_applies_by_itself():
    off = {"every_steps": None, "every_minutes": None, "every_epoch": False}
    late = {"steps_since": 50, "seconds_since": 3600.0, "epoch_ended": True}
    assert not is_due(Checkpoints(**off), **late)
    for rule, calm in (
        ({"every_steps": 50}, {"steps_since": 49}),
        ({"every_minutes": 60.0}, {"seconds_since": 3599.0}),
        ({"every_epoch": True}, {"epoch_ended": False}),
    ):
        policy = Checkpoints(**off | rule)
        assert is_due(policy, **late)
        assert not is_due(policy, **late | calm)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"every_steps": 0}, ValueError),
        ({"every_steps": 1.5}, TypeError),
        ({"every_steps": True}, TypeError),
        ({"every_minutes": 0}, ValueError),
        ({"every_minutes": -1.0}, ValueError),
        ({"every_minutes": math.nan}, ValueError),
        ({"keep": 0}, ValueError),
        ({"keep": 2.0}, TypeError),
    ],
)
def test_settings_check_themselves(settings, error):
    (name, value) = next(iter(settings.items()))
    with pytest.raises(error, match=f"{name}={value!r} must be"):
        Checkpoints(**settings)
