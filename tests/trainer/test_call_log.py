"""What a new rank goes through, at each place of a script where the others may be."""

from __future__ import annotations

import pickle

import pytest

from unisono.trainer.call_log import CallLog


def log_of(script: str) -> CallLog:
    """The log after some marks: ( and ) for the body of an epoch and the end of the loop, ? for a batch asked for."""
    log = CallLog()
    marks = {"(": log.begin_epoch, ")": log.leave_epochs, "?": log.ask}
    for mark in script:
        if mark in marks:
            marks[mark]()
        else:
            log.add(mark, mark)
    return log


@pytest.mark.parametrize(
    ("script", "older", "recent"),
    [
        ("", "", ""),
        ("ab", "ab", ""),  # outside of epochs no loop asks: a new rank makes these alone
        ("a(b", "a", "b"),
        ("a(b?c", "ab", "c"),
        ("a(b?cd?", "ab", ""),
        ("a(b?cd?e", "ab", "e"),  # what came before the latest batch is in the state of the others
        ("a(b?cd?e(f", "a", "f"),  # and so is an earlier epoch
        ("a(b?cd?e)", "a", ""),
        ("a(b?cd?e)fg", "afg", ""),
        ("a(b?c)d(e?f", "ade", "f"),  # a second loop over epochs
        ("a?b", "ab", ""),  # without trainer.epochs, which refuses what it cannot place
        ("a)b", "ab", ""),
    ],
)
def test_a_new_rank_goes_through_the_calls_of_its_place(script, older, recent):
    log = log_of(script)
    assert "".join(call.name for call in log.calls() if not call.is_recent) == older
    assert "".join(call.name for call in log.calls() if call.is_recent) == recent
    assert log.count == sum(letter.isalpha() for letter in script)


def test_a_new_rank_goes_on_with_the_log_of_another():
    """It is sent as a whole, and what comes after goes where it would have gone there."""
    for script in ("a", "a(b", "a(b?c", "a(b?c)d"):
        log, sent = log_of(script), pickle.loads(pickle.dumps(log_of(script)))
        for each in (log, sent):
            each.add("x", 1)
        assert sent.calls() == log.calls()
        assert (sent.count, sent.last, sent.is_outside) == (log.count, log.last, log.is_outside)
        for each in (log, sent):
            each.ask()
            each.add("y", 2)
        assert sent.calls() == log.calls()
