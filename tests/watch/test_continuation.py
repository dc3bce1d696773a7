"""A log of events goes on in another process: what is missing is told, and nothing is told twice."""

import json
import os

import pytest

from unisono.watch import EventLog


def step(log, number, loss=0.5):
    log.emit("step", epoch=0, step=number - 1, total_steps=number, loss=loss, samples=8, lr=0.1, step_s=0.01)


def told(path):
    return [(event["total_steps"], event["loss"]) for event in map(json.loads, path.read_text().splitlines())]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


@pytest.mark.parametrize("torn", [False, True])
def test_a_step_that_was_done_and_not_told_is_told(path, torn):
    other, dead = EventLog(), EventLog(path)
    for log in (dead, other):
        step(log, 1)
    step(other, 2, loss=float("inf"))
    dead.close()
    if torn:
        with path.open("a") as file:
            file.write('{"time": 1.0, "event": "step", "tot')
    new = EventLog(path)
    new.go_on(other.recent)
    step(new, 3)
    new.close()
    lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert [(e["total_steps"], e["loss"]) for e in map(json.loads, lines)] == [(1, 0.5), (2, "inf"), (3, 0.5)]


def test_a_step_that_was_told_and_is_made_again_is_told_once(path):
    other, dead = EventLog(), EventLog(path)
    for log in (other, dead):
        step(log, 1)
    step(dead, 2)
    dead.close()
    new = EventLog(path)
    new.go_on(other.recent)
    step(new, 2)
    step(new, 3)
    new.close()
    assert told(path) == [(1, 0.5), (2, 0.5), (3, 0.5)]


def test_a_log_in_which_nothing_is_missing_goes_on(path):
    other, dead = EventLog(), EventLog(path)
    for log in (dead, other):
        step(log, 1)
    dead.close()
    new = EventLog(path)
    new.go_on(other.recent)
    step(new, 2)
    new.close()
    assert told(path) == [(1, 0.5), (2, 0.5)]


def test_steps_that_a_killed_process_held_back_are_told_in_their_order(path):
    other = EventLog()
    if not (child := os.fork()):
        log = EventLog(path)
        for number in range(1, 31):
            step(log, number)
        os._exit(0)  # as if killed: nothing is written at the end
    os.waitpid(child, 0)
    assert len(told(path)) < 30
    for number in range(1, 31):
        step(other, number)
    with EventLog(path) as new:
        new.go_on(other.recent)
        step(new, 31)
    assert told(path) == [(number, 0.5) for number in range(1, 32)]
