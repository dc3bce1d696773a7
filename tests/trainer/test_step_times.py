"""Where the time of steps goes: each rank measures, rank 0 tells it about once a second, and no bit changes."""

from pathlib import Path

import pytest

from unisono.report.source import open_run
from unisono.watch import read_events

PROGRAM = Path(__file__).parent / "programs" / "timed_steps.py"
PARTS = ("data", "compute", "waiting", "update")
SLEEP_S = 0.001
READ_S = 0.006
"""So long that waits for it stand out from those for a core."""


def times_of(folder):
    """Return the events "times" of a run, after checks that hold for each."""
    events = [*read_events(folder / "events.jsonl")]
    steps_before = 0
    for event in events:
        if event["event"] == "step":
            steps_before = event["total_steps"]
        if event["event"] == "times":
            assert event["total_steps"] == steps_before  # the step that `last` is about is the latest in the log
            assert 1 <= event["steps"] <= event["of_steps"]
            for seconds, parts in ((event["seconds"], event), (event["last"]["seconds"], event["last"])):
                assert all(each >= 0 for name in PARTS for each in parts[name])
                assert sum(parts[name][0] for name in PARTS) <= seconds + 1e-5
            assert all(event["last"][name][rank] <= event[name][rank] for name in PARTS for rank in (0, -1))
    return [event for event in events if event["event"] == "times"]


@pytest.mark.parametrize("engine", ["auto", pytest.param("collective", marks=pytest.mark.soak)])
def test_a_rank_that_reads_slowly_is_seen_and_no_bit_changes(fork_ranks, tmp_path, engine):
    timed = fork_ranks(2, PROGRAM, "data", tmp_path / "run", engine)
    silent = fork_ranks(2, PROGRAM, "data", "-", engine)
    assert timed.out == silent.out
    found = times_of(tmp_path / "run")
    assert found
    for event in found:
        # Rank 1 reads 4 of 8 samples in each step, and rank 0 waits for it. A sleep is never too short.
        assert event["data"][1] >= event["steps"] * 4 * READ_S
        assert event["seconds"] >= event["data"][1]
    assert sum(event["waiting"][0] for event in found) > sum(event["waiting"][1] for event in found)
    times = open_run(tmp_path / "run")["times"]
    assert times["steps"] == sum(event["of_steps"] for event in found)
    assert times["ranks"]["data"][1] > times["steps"] * 4 * READ_S


def test_one_rank_computes_and_waits_for_nobody(fork_ranks, tmp_path):
    fork_ranks(1, PROGRAM, "compute", tmp_path / "run", "auto")
    found = times_of(tmp_path / "run")
    assert found
    for event in found:
        assert event["compute"][0] >= event["steps"] * 4 * SLEEP_S
        assert event["waiting"] == [0.0]
        # The loop's own sleep is in none of the parts.
        assert event["seconds"] - sum(event[name][0] for name in PARTS) >= event["steps"] * SLEEP_S * 0.99


def test_times_go_on_after_the_loss_of_a_rank(run_ranks, tmp_path):
    run_ranks(2, PROGRAM, "loses rank 1", tmp_path / "run", "auto")
    kinds = [event["event"] for event in read_events(tmp_path / "run" / "events.jsonl")]
    assert "times" in kinds[: kinds.index("recovery")]
    assert "times" in kinds[kinds.index("recovery") :]
    times_of(tmp_path / "run")
