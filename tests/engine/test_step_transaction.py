"""What a step defers is done once, and what it owes is raised when all is accounted for."""

from __future__ import annotations

import pytest

from unisono.engine import StepTransaction


def test_what_was_deferred_is_done_once():
    step, done = StepTransaction(), []
    step.run_deferred()
    step.deferred = lambda: done.append(1)
    step.run_deferred()
    step.run_deferred()
    assert done == [1]


def test_what_was_deferred_is_done_again_if_it_was_interrupted():
    step, done = StepTransaction(), []

    def deferred():
        done.append(1)
        if len(done) == 1:
            raise KeyboardInterrupt

    step.deferred = deferred
    with pytest.raises(KeyboardInterrupt):
        step.run_deferred()
    step.run_deferred()
    assert done == [1, 1]


def test_an_interrupt_comes_after_the_state_is_that_of_a_step():
    step = StepTransaction()
    step.writing = step.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        step.close()
    assert not step.writing
    step.close()  # it is owed once
