"""The benchmarks run from end to end and say what they found in the form that others read; never how fast."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def modules(monkeypatch):
    """Make the package bench importable, which is not installed."""
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import measure, page, rows, tables

    return measure, rows, tables, page


def test_list_names_every_benchmark_with_a_line():
    ended = bench("--list")
    assert ended.returncode == 0, ended.stderr
    names = [line.split(maxsplit=1)[0] for line in ended.stdout.splitlines() if len(line.split()) > 1]
    assert names == ["permutation", "step", "ddp", "exchange", "loading", "checkpoint", "start"]


def test_unknown_benchmark_is_refused_by_name():
    ended = bench("nonsense")
    assert ended.returncode == 2
    assert "nonsense" in ended.stderr


def test_step_runs_from_end_to_end(tmp_path):
    ended = bench("step", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    header, rule, *lines = (line.strip("|").split("|") for line in ended.stdout.splitlines())
    assert [cell.strip() for cell in header] == ["case", "peer", "peer's figure", "ours", "unit", "ratio", "goal", "n"]
    assert {len(line) for line in (header, rule, *lines)} == {8}
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(rows) == len(lines) == 4
    for row, line in zip(rows, lines, strict=True):
        assert (row["bench"], row["unit"], row["n"]) == ("step", "ms", 3)
        assert row["case"] == line[0].strip()
        assert row["ratio"] == pytest.approx(row["peer"]["median"] / row["ours"]["median"], rel=1e-4)


def test_exchange_measures_on_two_ranks(tmp_path):
    ended = bench("exchange", "--quick", "--json", str(tmp_path / "rows"))
    assert ended.returncode == 0, ended.stderr
    (row,) = (json.loads(line) for line in (tmp_path / "rows").read_text().splitlines())
    assert row["parameters"] == {"nbytes": 4096, "ranks": 2}


def test_sides_are_measured_in_pairs_of_random_but_equal_order(modules):
    measure, *_ = modules

    def order(seed):
        calls = []
        sides = [lambda name=name: calls.append(name) or 1.0 for name in ("ours", "peer")]
        pairs = measure.alternate(*sides, rounds=20, warmup=2, seed=seed)
        assert (len(pairs.ours), len(pairs.peer)) == (20, 20)
        return calls

    calls = order(0)
    assert calls == order(0) != order(1)
    assert {tuple(calls[i : i + 2]) for i in range(0, 44, 2)} == {("ours", "peer"), ("peer", "ours")}


def test_ratio_is_above_one_where_ours_is_faster_and_goals_bound_the_right_side(modules):
    _, rows, tables, _ = modules

    def row(unit, goal, ours, peer):
        return rows.summarise("b", "c", ours=[ours] * 4, peer=[peer] * 4, peer_name="p", unit=unit, goal=goal)

    ratio = rows.Goal(of="ratio", bound=1.0)
    assert (row("ms", ratio, 1.0, 2.0).ratio, row("ms", ratio, 1.0, 2.0).met) == (2.0, True)
    assert (row("samples/s", ratio, 1.0, 2.0).ratio, row("samples/s", ratio, 1.0, 2.0).met) == (0.5, False)
    ours = rows.Goal(of="ours", bound=5.0)
    assert [row("ms", ours, value, 1.0).met for value in (4.0, 6.0)] == [True, False]
    assert [row("million/s", ours, value, 1.0).met for value in (4.0, 6.0)] == [False, True]
    assert "ours ≤ 5: MISSED" in tables.table([row("ms", ours, 6.0, 1.0)])
    assert "ours ≥ 5: met" in tables.table([row("million/s", ours, 6.0, 1.0)])


def test_rows_survive_json_and_reach_the_page(modules):
    _, rows, tables, page = modules
    from bench.catalogue import BENCHMARKS

    goal = rows.Goal(of="ratio", bound=0.952)
    row = rows.summarise("step", "c", ours=[2.0, 3.0], peer=[1.0, 1.5], peer_name="p", unit="ms", goal=goal, ranks=2)
    assert rows.row_from_json(rows.row_to_json(row)) == row
    sections = [page.Section(BENCHMARKS[1], [row], None), page.Section(BENCHMARKS[2], [], "no gloo here")]
    text = page.page(sections, date="2000-01-01", machine="a machine", load="load", versions="torch 0")
    assert tables.table([row]) in text
    assert "**Goals missed**: step: c." in text
    assert "no gloo here" in text
    assert os.uname().nodename not in text.split()
