"""What the benchmarks of recovery make of the steps that ranks write down, and the page of the faults."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Make the package bench importable, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))


def steps(text: str):
    """Make steps of "time step rank pid" or "time step rank pid samples", one a line."""
    from bench.step_log import Done

    found = [line.split() for line in text.strip().splitlines()]
    return [Done(float(t), int(s), int(*more or [64]), int(r), int(p)) for t, s, r, p, *more in found]


def test_log_is_read_on_where_it_ended_and_only_by_whole_lines(tmp_path):
    from bench.step_log import Done, StepLog

    log, path = StepLog(tmp_path), tmp_path / "steps.1.70"
    assert (log.latest(), list(log.read())) == (0, [])
    path.write_text("1.5 1 64\n2.5 2 6")
    assert list(log.read()) == [Done(1.5, 1, 64, 1, 70)]
    path.write_text("1.5 1 64\n2.5 2 64\n")
    assert list(log.read()) == [Done(1.5, 1, 64, 1, 70), Done(2.5, 2, 64, 1, 70)]
    assert (log.latest(), log.latest(2.0), log.pids) == (2, 1, {70})
    assert log.digests() == {} == log.ways_s()
    (tmp_path / "digest.3").write_text("abc")
    (tmp_path / "digest.2.part").write_text("a")
    (tmp_path / "way.70").write_text("0.25\n")
    (tmp_path / "way.71").write_text("0.")
    assert (log.digests(), log.ways_s()) == ({3: "abc"}, {70: 0.25})


def test_a_step_that_the_dead_rank_took_part_in_is_not_new():
    from bench.step_log import first_new_s

    # Rank 1 died after step 5 was summed; rank 0 wrote it down later, and then both do step 6.
    done = steps("1 4 0 10\n1 4 1 11\n2.1 5 0 10")
    assert first_new_s(done, 4, {10, 11}) is None
    done += steps("9 6 0 10\n9.5 6 1 12")
    assert first_new_s(done, 4, {10, 11}) == 9.0
    # The new process repeats step 5, which nobody had done.
    assert first_new_s(steps("1 4 0 10\n1 4 1 11\n7 5 0 10\n8 5 1 12"), 4, {10, 11}) == 7.0
    # Nobody new: the survivors go on alone.
    assert first_new_s(steps("1 4 0 10\n1.2 5 0 10\n6 6 0 10"), 4, {10, 11}) == 6.0
    # New processes repeat steps from a checkpoint first.
    assert first_new_s(steps("1 4 0 10\n6 3 0 12\n7 4 0 12\n8 5 0 12"), 4, {10, 11}) == 8.0


def test_repeated_steps_and_dropped_samples_are_counted():
    from bench.step_log import dropped, latest_processes, repeated

    calm = steps("1 1 0 10\n1 1 1 11\n2 2 0 10\n2 2 1 11")
    assert (repeated(calm), dropped(calm, 64)) == (0, 0)
    again = calm + steps("5 1 0 12\n5 1 1 13\n6 2 0 12\n6 2 1 13\n7 3 0 12")
    assert (repeated(again), latest_processes(again)) == (2, {0: 12, 1: 13})
    alone = calm + steps("3 3 0 10 48\n4 4 0 10 48\n5 5 0 10 64")
    assert (repeated(alone), dropped(alone, 64)) == (0, 32)


def test_90th_percentile():
    from bench.kills import percentile_90

    assert percentile_90([3.0]) == 3.0
    assert percentile_90([float(value) for value in range(101)]) == pytest.approx(90.0)


def outcome(**changes):
    from bench.faults import FaultOutcome

    usual = FaultOutcome(
        system="unisono",
        fault="kill",
        seconds=0.25,
        replaced=True,
        exit_code=None,
        ranks=4,
        repeated=0,
        dropped=0,
        same=True,
    )
    return replace(usual, **changes)


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_tables_tell_what_became_of_each_fault():
    from bench.fault_page import fault_tables

    lost = {"seconds": None, "replaced": False, "ranks": 0, "same": False}
    text = fault_tables(
        [
            outcome(),
            outcome(seconds=0.35, same=False, repeated=1),
            outcome(seconds=0.3),
            outcome(system="peer", **lost, exit_code=1),
            outcome(system="peer", **{**lost, "replaced": True}),
            outcome(system="peer", fault="stop", **lost),
            outcome(fault="stop", seconds=5.5, ranks=3, dropped=160, replaced=False),
        ]
    )
    assert text.index("### kill") < text.index("### stop")
    assert "### term" not in text
    _, _, ours, peer, _, _, ours_stopped, peer_stopped = cells(text)
    assert ours == ["unisono", "yes", "yes", "0.30 s", "0", "0", "4", "2 of 3"]
    assert peer == ["peer", "yes", "no", "none: it ended with exit code 1", "–", "–", "0", "–"]
    assert ours_stopped == ["unisono", "yes", "yes", "5.50 s", "0", "160", "3", "yes"]
    assert peer_stopped == ["peer", "no", "no", "nothing within 60 s", "–", "–", "0", "–"]


def test_page_says_where_it_comes_from_and_what_is_missing():
    from bench.fault_page import fault_page, fault_tables

    facts = {"date": "2000-01-02", "machine": "a machine", "load": "load 1", "versions": "torch 0"}
    found = [outcome(), outcome()]
    text = fault_page(found, **facts)
    assert all(value in text for value in (*facts.values(), fault_tables(found), "2 times each"))
    assert "torchft was not installed" in text
    assert "torchft was not installed" not in fault_page([*found, outcome(system="torchft")], **facts)
    assert not {"{", "}"} & set(text)


@pytest.mark.soak
def test_kills_are_measured_and_change_no_bit(tmp_path):
    from bench.__main__ import main

    assert main(["kills", "--quick", "--json", str(tmp_path / "rows")]) == 0
    (row,) = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert row["n"] == 3
    assert row["case"].endswith("the same bits")
