"""Exchanges of ranks are timed by steps of a tiny model on this machine."""

from __future__ import annotations

import pytest

from unisono.errors import EstimateError
from unisono.estimate import exchange_times


@pytest.mark.soak  # plans of several ranks measure them, too
def test_exchanges_and_messages_take_some_time_between_two_ranks():
    found = exchange_times.measure_exchanges(2)
    assert 1e-6 < found.exchange_s < 0.2
    assert 1e-6 < found.message_s < 0.2
    assert exchange_times.measure_exchanges(1) == (0.0, 0.0, 0.0)


def test_ranks_that_cannot_be_started_are_an_error_that_says_why(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/nowhere")
    monkeypatch.setattr(exchange_times.sys, "executable", "/bin/false")
    with pytest.raises(EstimateError, match="steps of a tiny model on 2 ranks failed"):
        exchange_times.measure_exchanges(2)
