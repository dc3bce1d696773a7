"""What a loop does between its batches and epochs is done once in the life of a run, wherever it is stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "between.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, list[str]]:
    """The last two lines of runs that nobody stopped, by their arguments."""
    return {}


def finish(fork_ranks, directory: Path, *args: object) -> list[str]:
    return fork_ranks(1, PROGRAM, directory, *args).lines()


@pytest.mark.parametrize(
    ("stop", "begins", "args"),
    [
        # The loop stands before an evaluation, is in it, or has done it: what it did is not saved, but done again.
        ("error:evaluation:3", "0 3", []),
        ("error:stepped:6", "1 6", []),
        ("term:stepped:3", "0 3", ["--every", 1]),
        ("error:loss:4", "1 4", []),
        # After a step the rest of the body is waited for, if there is somebody who waits.
        ("error:body:4", "1 3", ["--teacher"]),
        ("int:body:4", "1 4", ["--teacher"]),
        ("term:loss:4", "1 5", ["--teacher"]),
        ("main-term:body:5", "1 5", ["--teacher"]),
        # What happens to a teacher is not known: nothing is saved in the middle of what may be done to it.
        ("error:loss:4", "1 3", ["--teacher"]),
        ("int:end:6", "2 6", ["--teacher"]),
    ],
)
def test_a_run_that_is_stopped_between_goes_on_to_the_same_bits(fork_ranks, tmp_path, undisturbed, stop, begins, args):
    key = str(args)
    if key not in undisturbed:
        undisturbed[key] = finish(fork_ranks, tmp_path / "calm", *args)[-2:]
    code = {"error": 1, "int": 130, "term": 143, "main-term": 143}[stop.partition(":")[0]]
    hurt = fork_ranks(2, PROGRAM, tmp_path / "hurt", "--stop", stop, *args, code=None)
    assert hurt.code == code, hurt.err
    lines = finish(fork_ranks, tmp_path / "hurt", *args)
    assert lines[0] == f"begins at {begins}"
    assert lines[-2:] == undisturbed[key]
    events = [json.loads(line) for line in (tmp_path / "hurt" / "events.jsonl").read_text().splitlines()]
    lost = [event["message"] for event in events if "were not saved" in event.get("message", "")]
    assert bool(lost) == (stop.startswith("error") and bool(args))
    if lost:
        assert "steps after 3 were not saved" in lost[0]


def test_steps_end_a_run_without_what_ends_an_epoch(fork_ranks, tmp_path, undisturbed):
    """In mid-epoch the loop's end of an epoch runs, but is no part of the run; at an epoch's end it is."""
    if "[]" not in undisturbed:
        undisturbed["[]"] = finish(fork_ranks, tmp_path / "calm")[-2:]
    for steps, begins in ((2, "0 0"), (3, "0 2"), (7, "1 3"), (9, "2 7")):
        lines = finish(fork_ranks, tmp_path / "hurt", "--steps", steps)
        assert lines[0] == f"begins at {begins}"
    assert lines[-2:] == undisturbed["[]"]
