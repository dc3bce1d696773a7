"""What ranks are told if they differ."""

from __future__ import annotations

import pytest

from unisono.engine.consistency import StepDescription, settle_differences
from unisono.errors import RankMismatchError


class _World:
    """A world whose other ranks have given documents; this rank's comes first."""

    def __init__(self, *others):
        self._others = others

    def gather(self, value):
        return [value, *self._others]


def _raise(own, *others, engine=({}, {})):
    description = StepDescription(0, lambda: own)
    settle_differences(_World(*((other, engine[1]) for other in others)), description, engine[0])


def test_calls_that_differ_are_told_before_all_else():
    with pytest.raises(RankMismatchError, match=r"ranks call different things: step\(\) on rank 0, save\(\) on") as e:
        _raise({"call": "step()", "lr": 1}, {"call": "save()", "lr": 2})
    assert "lr" not in str(e.value)
    assert "Nothing was changed" in str(e.value)


def test_what_differs_in_a_step_is_told_with_who_has_it():
    step = {"call": "step()", "lr": 0.1}
    with pytest.raises(RankMismatchError, match=r"ranks differ: lr is 0.1 on ranks 0-1 and 0.2 on rank 2") as e:
        _raise(step, step, {**step, "lr": 0.2})
    assert "weights and buffers keep their values" in str(e.value)


def test_the_engine_is_asked_if_nothing_else_differs():
    step = {"call": "step()"}
    with pytest.raises(RankMismatchError, match=r"ranks differ: place is 'new' on rank 0 and 'old' on rank 1"):
        _raise(step, step, engine=({"place": "new"}, {"place": "old"}))
    with pytest.raises(RankMismatchError, match=r"their fingerprints differ, though the descriptions behind them look"):
        _raise(step, step)
